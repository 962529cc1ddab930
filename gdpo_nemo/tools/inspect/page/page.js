// What happens when: the start, the address, the filters, the keys, and a run that goes on.
const EVERY_MS = 5000;

function replaceHash() {
  history.replaceState(null, '', hash());
}

// Another sample: a step in the browser's history.
function go(row) {
  state.row = row;
  if (hash() !== location.hash) history.pushState(null, '', hash() || '#');
  show();
}

function show() {
  document.body.classList.toggle('reading', state.row >= 0);
  const place = shown.indexOf(state.row);
  if (place >= 0) scrollTo(place);
  $('prompt-box').hidden = state.row < 0;
  drawRows();
  drawCurves();
  drawSample();
}

// Other filters, or another order.
function changed() {
  replaceHash();
  refresh();
  $('rows').scrollTop = 0;
  drawRows();
}

function refresh() {
  fillForm();
  choose();
  drawHeads();
  drawRows();
  drawCurves();
  $('count').textContent = shown.length === index.rows ? `${index.rows.toLocaleString('en')} samples`
    : `${shown.length.toLocaleString('en')} of ${index.rows.toLocaleString('en')} samples`;
}

function fillForm() {
  const form = $('filters');
  for (const field of form.elements) {
    if (!field.name) continue;
    if (field.type === 'checkbox') field.checked = Boolean(state.filters[field.name]);
    else if (document.activeElement !== field) field.value = state.filters[field.name] || (field.name === 'value' ? 'advantage' : '');
  }
  if (document.activeElement !== $('search')) $('search').value = state.query;
}

function readForm() {
  const form = $('filters');
  const before = state.filters.prompt;
  state.filters = {};
  for (const field of form.elements) {
    if (!field.name) continue;
    const value = field.type === 'checkbox' ? (field.checked ? '1' : '') : field.value;
    if (value) state.filters[field.name] = value;
  }
  if (state.filters.value === 'advantage' && !state.filters.low && !state.filters.high) delete state.filters.value;
  if (state.filters.prompt) state.filters.prompt = before || String(columns.prompt[state.row] + 1);
  changed();
}

function fillChoices() {
  const fill = (name, values, first) => {
    const select = document.querySelector(`#filters [name=${name}]`);
    select.replaceChildren(...(first === undefined ? [] : [make('option', first, { value: '' })]),
      ...values.map(([value, text]) => make('option', visible(text), { value })));
  };
  const same = (names) => names.map((name) => [name, name]);
  fill('kind', same(index.kinds), 'all');
  fill('outcome', same(index.names[0]), 'any');
  fill('environment', same(index.names[1]), 'any');
  fill('value', [['advantage', 'advantage'], ...index.rewards.map((name, i) => [`reward${i}`, name]),
    ...index.rewards.map((name, i) => [`term${i}`, `share of ${name}`]), ['grpo', 'GRPO would give'],
    ['logprob', 'mean log-prob'], ['gap', 'largest |trainer − sampler|'], ['turns', 'turns']]);
}

async function runSearch() {
  const note = (share) => {
    refresh();
    if (share < 1) $('count').textContent += `, ${Math.round(100 * share)} % searched`;
  };
  try {
    const query = state.query;
    delete document.body.dataset.searched;
    if (await search(query, note)) {
      refresh();
      document.body.dataset.searched = query;
    }
  } catch (error) {
    $('count').textContent = error.message;
  }
}

let typing = 0;

function onSearch() {
  clearTimeout(typing);
  state.query = $('search').value;
  replaceHash();
  typing = setTimeout(runSearch, 250);
}

const inGroup = (by) => {
  if (state.row < 0) return;
  const rows = groupOf(state.row);
  const next = rows[rows.indexOf(state.row) + by];
  if (next !== undefined) go(next);
};
const nextColour = () => {
  if (!now) return;
  const usable = COLOURS.filter((colour) => !colour.needs || now[colour.needs]);
  recolour(usable[(usable.indexOf(colourOf()) + 1) % usable.length].key);
};
const filters = (open) => {
  const is = document.body.classList.toggle('filtering', open);
  $('filter-button').setAttribute('aria-expanded', is);
};

const KEYS = {
  j: () => move(1), ArrowDown: () => move(1), k: () => move(-1), ArrowUp: () => move(-1),
  g: () => move(-shown.length), G: () => move(shown.length),
  n: () => inGroup(1), p: () => inGroup(-1), ']': () => otherStep(1), '[': () => otherStep(-1),
  ArrowRight: () => showToken(at + 1), ArrowLeft: () => showToken(Math.max(0, at - 1)),
  c: nextColour, d: () => $('other')?.focus(), '/': () => $('search').focus(), '?': () => $('keys').showModal(),
  f: () => { filters(true); document.querySelector('#filters select').focus(); },
  Escape: () => { if (document.body.classList.contains('filtering')) filters(false); else if (state.row >= 0) go(-1); },
};

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || $('keys').open) return;
  if (event.target.matches('input, select, textarea')) {
    if (event.key === 'Escape') event.target.blur();
    return;
  }
  const action = KEYS[event.key];
  if (!action) return;
  event.preventDefault();
  action();
}

function theme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
  root.dataset.theme = dark ? 'light' : 'dark';
}

// The run goes on: what was chosen stays chosen.
async function follow() {
  try {
    version = String(Date.now());
    const stamp = await load('stamp');
    if (follow.stamp !== undefined && stamp !== follow.stamp) {
      const place = state.row < 0 ? '' : address(state.row);
      await loadIndex();
      await loadTexts();
      fillChoices();
      state.row = place ? rowOf(place) : -1;
      refresh();
      if (state.query) runSearch();
    }
    follow.stamp = stamp;
  } catch { /* being written; the next look will find it */ }
  if (index.live) setTimeout(follow, EVERY_MS);
}

function listen() {
  $('rows').addEventListener('scroll', () => requestAnimationFrame(drawRows));
  $('rows').onclick = (event) => { const line = event.target.closest('[data-row]'); if (line) go(+line.dataset.row); };
  $('filters').oninput = readForm;
  $('filters').onreset = () => { setTimeout(() => { state.filters = {}; changed(); }); };
  $('filters').onsubmit = (event) => event.preventDefault();
  $('search').oninput = onSearch;
  $('theme').onclick = theme;
  $('help').onclick = () => $('keys').showModal();
  $('filter-button').onclick = () => filters();
  addEventListener('keydown', onKey);
  addEventListener('resize', () => requestAnimationFrame(drawRows));
  addEventListener('popstate', open);
  addEventListener('hashchange', open);
}

function open() {
  const query = state.query;
  readHash();
  refresh();
  show();
  if (state.query !== query) runSearch();
}

async function start() {
  try {
    await loadIndex();
  } catch (error) {
    $('detail').replaceChildren(make('p', `${error.message}. The folder “data” belongs beside this page.`, { class: 'notice bad' }));
    return;
  }
  listen();
  fillChoices();
  open();
  document.body.dataset.ready = 'list';
  await loadTexts();
  drawRows();
  if (state.row >= 0) await drawSample();
  document.body.dataset.ready = 'all';
  if (index.live) follow();
}

start();
