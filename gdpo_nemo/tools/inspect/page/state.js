// What is looked at: the filters, the order, the sample. All of it stands behind the # of the address.
const FILTERS = ['kind', 'from', 'to', 'outcome', 'environment', 'value', 'low', 'high', 'short', 'long',
  'truncated', 'failed', 'duplicates', 'turns', 'prompt'];
const state = { row: -1, filters: {}, sort: 'order', down: false, query: '', colour: '' };
let shown = new Int32Array(0);
let hits = null;
let found = 0;

const $ = (id) => document.getElementById(id);

function make(tag, text, attributes) {
  const element = document.createElement(tag);
  if (text !== undefined && text !== '') element.textContent = text;
  for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
  return element;
}

// Control characters, and those that turn the direction of what follows, are shown instead of obeyed.
function visible(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g,
    (letter) => `⟨${letter.charCodeAt(0).toString(16).toUpperCase().padStart(4, '0')}⟩`);
}

const number = (value, digits) => value === null || value === undefined || Number.isNaN(value)
  ? '–' : Number.isInteger(value) ? String(value) : value.toFixed(digits === undefined ? 3 : digits);
const signed = (value, digits) => (value > 0 ? '+' : '') + number(value, digits);

function address(row) {
  const kind = columns.kind[row] ? 'v' : '';
  return `${kind}${columns.step[row]}/${columns.group[row]}/${columns.sample[row]}`;
}

function rowOf(text) {
  const match = /^(v?)(\d+)(?:\/(\d+)(?:\/(\d+))?)?$/.exec(text);
  if (!match) return -1;
  const [, kind, step, group, sample] = match;
  for (let row = 0; row < index.rows; row++) {
    if (columns.step[row] === +step && columns.kind[row] === (kind ? 1 : 0)
      && (group === undefined || columns.group[row] === +group)
      && (sample === undefined || columns.sample[row] === +sample)) return row;
  }
  return -1;
}

function hash() {
  const query = new URLSearchParams();
  for (const name of FILTERS) if (state.filters[name]) query.set(name, state.filters[name]);
  if (state.query) query.set('q', state.query);
  if (state.sort !== 'order' || state.down) query.set('sort', (state.down ? '-' : '') + state.sort);
  if (state.colour) query.set('colour', state.colour);
  const text = query.toString();
  return `#${state.row < 0 ? '' : address(state.row)}${text ? '?' + text : ''}`;
}

function readHash() {
  const [place, query] = location.hash.slice(1).split('?');
  const given = new URLSearchParams(query || '');
  state.filters = {};
  for (const name of FILTERS) if (given.get(name)) state.filters[name] = given.get(name);
  state.query = given.get('q') || '';
  const sort = given.get('sort') || 'order';
  state.down = sort.startsWith('-');
  state.sort = sort.replace(/^-/, '');
  if (state.sort !== 'order' && !columns[state.sort]) state.sort = 'order';
  state.colour = given.get('colour') || '';
  state.row = rowOf(place);
}

function range(values, low, high) {
  const least = low === undefined ? -Infinity : +low;
  const most = high === undefined ? Infinity : +high;
  return (row) => values[row] >= least && values[row] <= most;
}

function tests() {
  const f = state.filters;
  const outcomes = index.names[0];
  const list = [];
  if (f.kind) list.push((row) => index.kinds[columns.kind[row]] === f.kind);
  if (f.from || f.to) list.push(range(columns.step, f.from, f.to));
  if (f.outcome) list.push((row) => outcomes[columns.outcome[row]] === f.outcome);
  if (f.environment) list.push((row) => index.names[1][columns.environment[row]] === f.environment);
  if ((f.low || f.high) && columns[f.value || 'advantage']) list.push(range(columns[f.value || 'advantage'], f.low, f.high));
  if (f.short || f.long) list.push(range(columns.length, f.short, f.long));
  if (f.truncated) list.push((row) => outcomes[columns.outcome[row]] === 'truncated' || index.names[2][columns.finish[row]] === 'length');
  if (f.failed) list.push((row) => !['ok', 'truncated'].includes(outcomes[columns.outcome[row]]));
  if (f.duplicates) list.push((row) => columns.equal[row] > 1);
  if (f.turns) list.push((row) => columns.turns[row] > 1);
  if (f.prompt) list.push((row) => columns.prompt[row] === +f.prompt - 1);
  if (hits) list.push((row) => hits[row] === 1);
  return list;
}

function choose() {
  const list = tests();
  const rows = [];
  for (let row = 0; row < index.rows; row++) if (list.every((test) => test(row))) rows.push(row);
  shown = Int32Array.from(rows);
  const values = columns[state.sort];
  const sign = state.down ? -1 : 1;
  if (values) {
    // What has no value comes last, whatever the order.
    const key = (row) => (Number.isNaN(values[row]) ? Infinity : sign * values[row]);
    shown.sort((a, b) => { const x = key(a); const y = key(b); return x < y ? -1 : x > y ? 1 : a - b; });
  } else if (state.down) shown.reverse();
}

// Reads text after text and keeps none of them.
async function search(query, progress) {
  const mine = ++found;
  hits = null;
  if (!query) return true;
  const wanted = query.toLowerCase();
  const marks = new Uint8Array(index.rows);
  hits = marks;
  const has = (text) => text.toLowerCase().includes(wanted);
  const starts = index.starts[0];
  for (let place = 0; place < starts.length; place++) {
    const name = shardName('text', place);
    const texts = await (shards.get(name) || load(name));
    if (mine !== found) return false;
    const prompts = texts.prompts.map(has);
    texts.completion.forEach((text, at) => {
      if (prompts[texts.promptOf[at]] || has(text) || (texts.detail[at] && has(texts.detail[at]))) marks[starts[place] + at] = 1;
    });
    progress((place + 1) / starts.length);
  }
  return true;
}
