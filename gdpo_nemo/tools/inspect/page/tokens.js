// A completion token by token: what each stands for, and its values as colours.
const AT_ONCE = 4000;
const RATIO = (now, i) => now.trainer && Math.exp(now.trainer[i] - now.logprobs[i]);
const COLOURS = [
  { key: 'advantage', name: 'advantage', legend: 'green: more likely from here on, red: less; grey: not trained',
    strength: (now, i) => (now.written[i] ? now.advantage / 2 : 0) },
  { key: 'logprob', name: 'log-prob', legend: 'the redder, the less likely the sampler found the token',
    strength: (now, i) => Math.min(0, now.logprobs[i] / 4) },
  { key: 'gap', name: 'trainer − sampler', needs: 'trainer', legend: 'log-probs: green where the trainer finds the token more likely; full at 0.1',
    strength: (now, i) => (now.trainer ? (now.trainer[i] - now.logprobs[i]) / 0.1 : 0) },
  { key: 'ratio', name: 'ratio', needs: 'trainer', legend: 'exp(trainer − sampler): red below 1, green above; full at 0.8 and 1.2',
    strength: (now, i) => (now.trainer ? (RATIO(now, i) - 1) / 0.2 : 0) },
  { key: 'entropy', name: 'entropy', needs: 'entropy', plain: true, legend: 'the bluer, the more the policy had to choose from; full at 2 nats',
    strength: (now, i) => (now.entropy && now.entropy[i] > 0 ? Math.min(1, now.entropy[i] / 2) : 0) },
  { key: 'version', name: 'weights', legend: 'the paler, the older the weights that wrote the token', plain: true,
    strength: (now, i) => (now.versions[i] < 0 ? 0 : now.newest === now.oldest ? 0.5 : 0.15 + 0.85 * (now.versions[i] - now.oldest) / (now.newest - now.oldest)) },
  { key: 'mask', name: 'mask', legend: 'blue: the policy wrote it, so it is trained; not: the environment did', plain: true,
    strength: (now, i) => (now.written[i] ? 0.5 : 0) },
  { key: 'none', name: 'none', legend: '', strength: () => 0 },
];

let now = null;
let at = -1;

// The weights of each token; -1 where the policy did not write.
function versionsOf(spans, written, first) {
  const versions = new Array(written.length).fill(-1);
  const pairs = spans.length ? spans : [first, written.length];
  let pair = 0;
  let left = pairs[1];
  for (let i = 0; i < written.length; i++) {
    if (!written[i]) continue;
    while (left === 0 && pair + 2 < pairs.length) { pair += 2; left = pairs[pair + 1]; }
    versions[i] = pairs[pair];
    left--;
  }
  return versions;
}

function textsOf(ids) {
  const decoder = new TextDecoder();
  return Array.from(ids, (id) => {
    const piece = vocabulary.get(id);
    if (Array.isArray(piece)) return decoder.decode(new Uint8Array(piece), { stream: true }) || '·';
    if (typeof piece === 'string') return piece;
    return `[${id}]`;
  });
}

const colourOf = () => COLOURS.find((colour) => colour.key === state.colour) || COLOURS[0];

function drawTokens(box) {
  const colour = colourOf();
  box.replaceChildren();
  const turns = conversation();
  const parts = turns.length > 1 ? turns : [{ written: true, first: 0, last: now.ids.length, alone: true }];
  const queue = [];
  let number = 0;
  for (const part of parts) {
    const block = make('div', '', { class: part.alone ? '' : `turn ${part.written ? 'policy' : 'environment'}` });
    if (!part.alone) block.append(make('b', part.written ? `policy, turn ${++number}` : 'environment'));
    box.append(block);
    queue.push({ block, next: part.first, last: part.last });
  }
  more(box, queue, colour);
}

// Elements for the next few thousand tokens, and a button for the rest.
function more(box, queue, colour) {
  let left = AT_ONCE;
  while (queue.length && left > 0) {
    const part = queue[0];
    const last = Math.min(part.last, part.next + left);
    for (let i = part.next; i < last; i++) {
      const image = now.images.find((one) => one.start >= 0 && one.start <= i && i < one.start + one.tokens);
      if (!image) part.block.append(tokenElement(i, colour));
      else if (i === image.start) part.block.append(picture(image));
    }
    left -= last - part.next;
    part.next = last;
    if (part.next >= part.last) queue.shift();
  }
  if (!queue.length) return;
  const rest = queue.reduce((sum, part) => sum + part.last - part.next, 0);
  const button = make('button', `${rest} more tokens`, { type: 'button' });
  button.onclick = () => { button.remove(); more(box, queue, colour); };
  box.append(button);
}

function tokenElement(i, colour) {
  const text = now.texts[i];
  const element = make('span', visible(text).replace(/\n/g, '↵\n') || '·', { 'data-token': i });
  if (i === at) element.className = 'at';
  else if (now.tools[i]) element.className = 'tool';
  if (isQuoted(i)) element.classList.add('quoted');
  const strength = colour.strength(now, i);
  if (strength) element.style.backgroundColor = colour.plain ? `rgb(var(--plain) / ${(0.4 * strength).toFixed(3)})` : paint(strength);
  return element;
}

// True for the tokens that the chosen criterion's verdict quotes.
function isQuoted(i) {
  const quote = now.quote || [];
  for (let k = 0; k < quote.length; k += 2) if (quote[k] <= i && i < quote[k + 1]) return true;
  return false;
}

// Runs of tokens of one writer.
function conversation() {
  const turns = [];
  for (let i = 0; i < now.ids.length; i++) {
    const last = turns[turns.length - 1];
    const written = now.written[i] === 1;
    if (last && last.written === written) last.last = i + 1;
    else turns.push({ written, first: i, last: i + 1 });
  }
  return turns;
}

// Tokens between the marks that models put around a call of a tool.
function toolCalls(texts) {
  const marks = new Uint8Array(texts.length);
  let inside = false;
  texts.forEach((text, i) => {
    if (text.includes('<tool_call>')) inside = true;
    marks[i] = inside ? 1 : 0;
    if (text.includes('</tool_call>')) inside = false;
  });
  return marks;
}

function showToken(i) {
  const box = $('tokens');
  if (!box || !now || i < 0 || i >= now.ids.length) return;
  box.querySelector('.at')?.classList.remove('at');
  at = i;
  const element = box.querySelector(`[data-token="${i}"]`);
  if (element) {
    element.classList.add('at');
    element.scrollIntoView({ block: 'nearest' });
  }
  const logprob = now.logprobs[i];
  const trainer = now.trainer ? now.trainer[i] : NaN;
  const values = [
    ['token', `${i} of ${now.ids.length}`], ['id', now.ids[i]], ['text', JSON.stringify(visible(now.texts[i]))],
    ['log-prob', number(logprob, 6)], ['probability', number(Math.exp(logprob), 4)],
    ['trainer', number(trainer, 6)], ['trainer − sampler', number(trainer - logprob, 6)], ['ratio', number(Math.exp(trainer - logprob), 4)],
    ...(now.entropy ? [['entropy', number(now.entropy[i], 6)]] : []),
    ['advantage', now.written[i] ? number(now.advantage, 6) : '–'], ['weights', now.versions[i] < 0 ? '–' : now.versions[i]],
    ['written by', now.written[i] ? 'policy' : 'environment'],
  ];
  $('values').className = '';
  $('values').replaceChildren(...values.flatMap(([name, value]) => {
    const shownValue = make('span', ` ${value}`, { 'data-value': name });
    return [make('b', name), shownValue];
  }));
}
