// One sample: its rewards, its group, its tokens, and the same prompt at other steps.
let drawing = 0;

async function drawSample() {
  const mine = ++drawing;
  const row = state.row;
  const box = $('detail');
  if (row < 0) {
    now = null;
    box.replaceChildren(make('p', 'Choose a sample.', { class: 'notice' }));
    return;
  }
  let text;
  let tokens;
  let images;
  try {
    [text, tokens] = await Promise.all([textOf(row), tokensOf(row)]);
    images = await imagesOf(text.images);
  } catch (error) {
    if (mine === drawing) box.replaceChildren(make('p', error.message, { class: 'notice bad' }));
    return;
  }
  if (mine !== drawing) return;
  const versions = versionsOf(text.spans, tokens.written, text.version);
  const known = versions.filter((one) => one >= 0);
  const texts = textsOf(tokens.ids);
  now = { row, text, ...tokens, images, versions, texts, tools: toolCalls(texts), advantage: text.advantage ?? NaN,
    newest: known.reduce((a, b) => Math.max(a, b), -1), oldest: known.reduce((a, b) => Math.min(a, b), Infinity) };
  at = -1;
  box.replaceChildren(bar(row), rewardTable(row, text), facts(row, text), ...criteria(text),
    ...section('Prompt', ...pictures(images.filter((image) => image.start < 0)), make('pre', visible(text.prompt), { id: 'prompt' })),
    ...completion(), ...extra(text), ...section(`Group of ${groupOf(row).length}`, groupTable(row)), ...others(row));
  drawTokens($('tokens'));
  box.scrollTop = 0;
}

const section = (title, ...parts) => [make('h3', title), ...parts];

function picture(image) {
  const figure = make('figure', '', { title: `SHA-256 ${visible(image.sha256)}` });
  if (image.png) figure.append(make('img', '', { src: `data:image/png;base64,${image.png}`, alt: '' }));
  figure.append(make('figcaption', `${image.width}×${image.height} ${visible(image.sha256.slice(0, 4))}…${image.png ? '' : ' (missing)'}`));
  return figure;
}

function pictures(images) {
  if (!images.length) return [];
  const box = make('div', '', { class: 'pictures' });
  box.append(...images.map(picture));
  return [box];
}

function button(text, title, action) {
  const element = make('button', text, { type: 'button', title });
  element.onclick = action;
  return element;
}

function bar(row) {
  const line = make('div', '', { class: 'bar' });
  const back = button('← list', 'back to the list', () => go(-1));
  back.id = 'back';
  const title = make('h2', `${columns.kind[row] ? 'Validation at step' : 'Step'} ${columns.step[row]}, group ${columns.group[row]}, sample ${columns.sample[row]}`);
  const link = make('a', 'link', { href: '#' + address(row), title: 'address of this sample' });
  line.append(back, title, link, button('‹', 'previous of the list (k)', () => move(-1)), button('›', 'next of the list (j)', () => move(1)));
  return line;
}

function tableOf(heads, rows, foot) {
  const table = make('table');
  const line = (cells, tag) => { const tr = make('tr'); tr.append(...cells.map((cell) => make(tag, cell))); return tr; };
  const head = make('thead');
  head.append(line(heads, 'th'));
  const body = make('tbody');
  body.append(...rows.map((cells) => line(cells, 'td')));
  table.append(head, body);
  if (foot) { const end = make('tfoot'); end.append(line(foot, 'td')); table.append(end); }
  const scroll = make('div', '', { class: 'scroll' });
  scroll.append(table);
  return scroll;
}

function rewardTable(row, text) {
  const group = groupOf(row);
  const mean = (values) => { const known = group.map((r) => values[r]).filter((v) => !Number.isNaN(v)); return known.length ? known.reduce((a, b) => a + b, 0) / known.length : NaN; };
  const rows = index.rewards.map((name, i) => [visible(name), number(text.rewards?.[i]), number(mean(columns[`reward${i}`])), text.terms ? signed(text.terms[i]) : '–']);
  const table = tableOf(['reward', 'value', 'mean of the group', 'term before the batch norm'], rows,
    ['advantage', number(text.advantage, 6), '', `GRPO: ${signed(columns.grpo[row])}`]);
  table.id = 'rewards';
  table.querySelector('tfoot td:last-child').title = 'of the weighted sum of the rewards as recorded';
  return table;
}

// The criteria of the row's rubric, those with the largest term first. A click marks the tokens that a verdict quotes.
function criteria(text) {
  if (!text.verdicts) return [];
  const size = (i) => Math.abs(text.verdicts[i][1] ?? 0);
  const order = text.rubric.map((_, i) => i).sort((a, b) => size(b) - size(a) || a - b);
  const families = new Set(text.rubric.map(([family]) => family));
  const cells = order.map((i) => {
    const [family, id, criterion, weight, required] = text.rubric[i];
    const [verdict, term, ...quote] = text.verdicts[i];
    const name = families.size > 1 ? `${family} ${id}` : id;
    return [visible(name), visible(criterion), number(weight), required ? 'yes' : '', number(verdict), signed(term), quote.length ? 'mark' : ''];
  });
  const table = tableOf(['id', 'criterion', 'weight', 'required', 'verdict', 'term', 'quote'], cells);
  table.id = 'criteria';
  table.querySelectorAll('tbody tr').forEach((line, i) => {
    const quote = text.verdicts[order[i]].slice(2);
    if (!quote.length) return;
    line.lastChild.className = 'quote';
    line.onclick = () => {
      const again = line.classList.contains('here');
      table.querySelector('.here')?.classList.remove('here');
      if (!again) line.classList.add('here');
      now.quote = again ? [] : quote;
      drawTokens($('tokens'));
      $('tokens').querySelector('.quoted')?.scrollIntoView({ block: 'nearest' });
    };
  });
  return section(`${text.rubric.length} criteria`, table);
}

function facts(row, text) {
  const parts = [`${index.names[0][columns.outcome[row]]}, ended by ${index.names[2][columns.finish[row]]}`, `${columns.length[row]} tokens`,
    index.names[1][columns.environment[row]], `prompt ${visible(text.id)}`, `mean log-prob ${number(columns.logprob[row])}`];
  if (columns.turns[row] > 1) parts.push(`${columns.turns[row]} turns`);
  if (columns.equal[row] > 1) parts.push(`${columns.equal[row]} of the group are alike`);
  if (!Number.isNaN(columns.gap[row])) parts.push(`largest |trainer − sampler| ${number(columns.gap[row], 5)}`);
  const box = make('div', parts.join(' · '), { class: 'dim' });
  if (text.detail) box.append(make('p', visible(text.detail), { class: 'bad' }));
  return box;
}

function completion() {
  const tools = make('div', '', { class: 'bar', role: 'group', 'aria-label': 'Colour tokens by' });
  for (const colour of COLOURS) {
    const one = button(colour.name, colour.legend, () => recolour(colour.key));
    one.setAttribute('aria-pressed', colour === colourOf());
    one.dataset.colour = colour.key;
    if (colour.needs && !now[colour.needs]) { one.disabled = true; one.title = colour.needs === 'entropy' ? 'not recorded: rollout.save_entropies' : "the trainer's log-probs were not recorded"; }
    tools.append(one);
  }
  const tokens = make('div', '', { class: 'tokens', id: 'tokens' });
  tokens.onclick = (event) => showToken(+(event.target.dataset.token ?? -1));
  tokens.onmouseover = tokens.onclick;
  const values = make('div', 'Point at a token, or press →.', { id: 'values', class: 'dim' });
  const plain = make('details');
  plain.append(make('summary', 'As text'), make('pre', visible(now.text.completion), { id: 'completion' }));
  return section('Completion', tools, make('div', colourOf().legend, { class: 'legend', id: 'legend' }), tokens, values, plain);
}

function recolour(key) {
  state.colour = key;
  replaceHash();
  document.querySelectorAll('[data-colour]').forEach((one) => one.setAttribute('aria-pressed', one.dataset.colour === key));
  $('legend').textContent = colourOf().legend;
  drawTokens($('tokens'));
}

function extra(text) {
  if (!text.extra) return [];
  let shownText = text.extra;
  try { shownText = JSON.stringify(JSON.parse(text.extra), null, 1); } catch { /* shown as it is */ }
  return section('Written by the verifier', make('pre', visible(shownText)));
}

// Rows of a group stand together.
function groupOf(row) {
  const same = (r) => r >= 0 && r < index.rows && columns.group[r] === columns.group[row] && columns.step[r] === columns.step[row] && columns.kind[r] === columns.kind[row];
  let first = row;
  while (same(first - 1)) first--;
  const rows = [];
  for (let r = first; same(r); r++) rows.push(r);
  return rows;
}

function groupTable(row) {
  const rows = groupOf(row);
  const cells = rows.map((r) => [String(columns.sample[r]), signed(columns.advantage[r]), signed(columns.grpo[r]),
    ...index.rewards.map((_, i) => number(columns[`reward${i}`][r], 2)), String(columns.length[r]), index.names[0][columns.outcome[r]]]);
  const table = tableOf(['sample', 'advantage', 'GRPO', ...index.rewards.map(visible), 'tokens', 'outcome'], cells);
  table.querySelectorAll('tbody tr').forEach((line, i) => {
    line.dataset.row = rows[i];
    if (rows[i] === row) line.className = 'here';
    line.onclick = () => go(rows[i]);
  });
  return table;
}

// The prompt's other samples: of each step the one with the largest advantage, and all of this group.
function counterparts(row) {
  const best = new Map();
  for (let r = 0; r < index.rows; r++) {
    if (columns.prompt[r] !== columns.prompt[row] || r === row) continue;
    const key = `${columns.kind[r]}/${columns.step[r]}/${columns.group[r]}`;
    const before = best.get(key);
    if (before === undefined || columns.advantage[r] > columns.advantage[before]) best.set(key, r);
  }
  const own = groupOf(row).filter((r) => r !== row);
  return [...new Set([...best.values(), ...own])].sort((a, b) => columns.kind[a] - columns.kind[b] || a - b);
}

function others(row) {
  const rows = counterparts(row);
  if (!rows.length) return [];
  const choice = make('select', '', { id: 'other', 'aria-label': 'compare with' });
  choice.append(make('option', 'compare with …', { value: '' }));
  for (const r of rows) choice.append(make('option', `${address(r)}, advantage ${signed(columns.advantage[r])}`, { value: r }));
  const result = make('div', '', { id: 'difference' });
  choice.onchange = () => choice.value && drawDifference(row, +choice.value, result);
  const steps = new Set(rows.map((r) => `${columns.kind[r]}/${columns.step[r]}`));
  steps.add(`${columns.kind[row]}/${columns.step[row]}`);
  return section(`This prompt, at ${steps.size} ${steps.size > 1 ? 'steps' : 'step'}`, choice, result);
}

async function drawDifference(row, other, box) {
  const [here, there] = await Promise.all([textOf(row), textOf(other)]);
  const pre = make('pre');
  const parts = difference(there.completion.match(/\s+|\w+|[^\s\w]/gu) || [], here.completion.match(/\s+|\w+|[^\s\w]/gu) || []);
  pre.append(...parts.map(([kind, words]) => make(kind, visible(words.join('')))));
  const open = button('open it', 'show that sample', () => go(other));
  box.replaceChildren(make('p', `Red: in ${address(other)} only. Green: in this one only. `, { class: 'legend' }), pre, open);
}

// Longest common subsequence; of long texts that share little the middle stands as a whole.
function difference(a, b) {
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start++;
  let end = 0;
  while (end < a.length - start && end < b.length - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end++;
  const x = a.slice(start, a.length - end);
  const y = b.slice(start, b.length - end);
  const parts = [['span', a.slice(0, start)]];
  if (x.length * y.length > 4e6) parts.push(['del', x], ['ins', y]);
  else parts.push(...common(x, y));
  parts.push(['span', a.slice(a.length - end)]);
  return parts.filter(([, words]) => words.length);
}

function common(x, y) {
  const wide = y.length + 1;
  const length = new Uint16Array((x.length + 1) * wide);
  for (let i = x.length - 1; i >= 0; i--) for (let j = y.length - 1; j >= 0; j--) {
    length[i * wide + j] = x[i] === y[j] ? length[(i + 1) * wide + j + 1] + 1 : Math.max(length[(i + 1) * wide + j], length[i * wide + j + 1]);
  }
  const parts = [];
  const add = (kind, word) => { if (parts.length && parts[parts.length - 1][0] === kind) parts[parts.length - 1][1].push(word); else parts.push([kind, [word]]); };
  let i = 0;
  let j = 0;
  while (i < x.length || j < y.length) {
    if (i < x.length && j < y.length && x[i] === y[j]) { add('span', x[i]); i++; j++; }
    else if (j >= y.length || (i < x.length && length[(i + 1) * wide + j] >= length[i * wide + j + 1])) add('del', x[i++]);
    else add('ins', y[j++]);
  }
  return parts;
}

// The same prompt at the next (1) or the previous (-1) place where it was sampled.
function otherStep(by) {
  if (state.row < 0) return;
  const places = new Map();
  for (let r = 0; r < index.rows; r++) {
    if (columns.prompt[r] === columns.prompt[state.row] && columns.kind[r] === columns.kind[state.row]) {
      const key = `${columns.step[r]}/${columns.group[r]}`;
      if (!places.has(key)) places.set(key, r);
    }
  }
  const keys = [...places.keys()];
  const next = keys[keys.indexOf(`${columns.step[state.row]}/${columns.group[state.row]}`) + by];
  if (next) go(places.get(next));
}
