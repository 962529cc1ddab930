// The list of samples, of which those in sight exist as elements.
const HEIGHT = 28;
const SPARE = 10;

function listColumns() {
  const rewards = index.rewards.map((name, i) => ({ key: `reward${i}`, name, wide: '3.5rem', value: (row) => number(columns[`reward${i}`][row], 2) }));
  return [
    { key: 'order', name: 'step', wide: '3.1rem', value: (row) => (columns.kind[row] ? 'v' : '') + columns.step[row] },
    { key: 'group', name: 'group', wide: '3.7rem', value: (row) => `${columns.group[row]}/${columns.sample[row]}` },
    { key: 'advantage', name: 'advantage', wide: '4.9rem', value: (row) => signed(columns.advantage[row], 2), paint: (row) => columns.advantage[row] / 2 },
    ...rewards.slice(0, 5),
    { key: 'length', name: 'tokens', wide: '3.3rem', value: (row) => String(columns.length[row]) },
    { key: 'outcome', name: 'outcome', wide: '4.4rem', value: (row) => index.names[0][columns.outcome[row]], bad: (row) => index.names[0][columns.outcome[row]] !== 'ok' },
    { key: 'equal', name: 'alike', wide: '2.6rem', value: (row) => (columns.equal[row] > 1 ? String(columns.equal[row]) : '') },
    { key: null, name: 'completion', wide: 'minmax(12rem, 1fr)', value: (row) => visible(snippets[row] || '').replace(/\n/g, '↵'), text: true },
  ];
}

let fields = [];

function drawHeads() {
  fields = listColumns();
  document.documentElement.style.setProperty('--columns', fields.map((field) => field.wide).join(' '));
  document.documentElement.style.setProperty('--least', fields.reduce((sum, field) => sum + parseFloat(field.wide.replace('minmax(', '')), 0) + 'rem');
  $('heads').replaceChildren(...fields.map((field) => {
    const sorted = field.key && field.key === state.sort;
    const head = make('button', field.name + (sorted ? (state.down ? ' ↓' : ' ↑') : ''), { type: 'button', title: `sort by ${field.name}` });
    if (field.text) head.className = 'text';
    if (sorted) head.setAttribute('aria-sort', state.down ? 'descending' : 'ascending');
    if (field.key) head.onclick = () => {
      state.down = sorted ? !state.down : field.key !== 'order' && field.key !== 'group';
      state.sort = field.key;
      changed();
    };
    else head.disabled = true;
    return head;
  }));
}

function drawRows() {
  const box = $('rows');
  $('space').style.height = `${shown.length * HEIGHT}px`;
  const first = Math.max(0, Math.floor(box.scrollTop / HEIGHT) - SPARE);
  const last = Math.min(shown.length, Math.ceil((box.scrollTop + box.clientHeight) / HEIGHT) + SPARE);
  const elements = [];
  for (let place = first; place < last; place++) elements.push(rowElement(shown[place], place));
  $('space').replaceChildren(...elements);
}

function rowElement(row, place) {
  const line = make('div', '', { class: 'row', role: 'option', 'aria-selected': row === state.row, 'data-row': row });
  line.style.top = `${place * HEIGHT}px`;
  for (const field of fields) {
    const cell = make('span', field.value(row));
    if (field.text) cell.className = 'text';
    if (field.bad?.(row)) cell.className = 'bad';
    if (field.paint) cell.style.backgroundColor = paint(field.paint(row));
    line.append(cell);
  }
  return line;
}

// Green above 0, red below; 1 is as strong as it gets.
function paint(strength) {
  if (!strength || Number.isNaN(strength)) return '';
  return `rgb(var(--${strength > 0 ? 'good' : 'poor'}) / ${Math.min(0.55, 0.06 + 0.5 * Math.abs(strength)).toFixed(3)})`;
}

function scrollTo(place) {
  const box = $('rows');
  const top = place * HEIGHT;
  if (top < box.scrollTop || top + HEIGHT > box.scrollTop + box.clientHeight) box.scrollTop = Math.max(0, top - box.clientHeight / 2);
}

function move(by) {
  if (!shown.length) return;
  const here = shown.indexOf(state.row);
  const next = here < 0 ? 0 : Math.min(shown.length - 1, Math.max(0, here + by));
  go(shown[next]);
}
