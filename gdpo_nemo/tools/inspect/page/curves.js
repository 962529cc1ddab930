// Small curves over the steps; a click shows the samples of the step.
const SVG = 'http://www.w3.org/2000/svg';

function svg(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

function drawCurves() {
  $('curves').replaceChildren(...index.curves.map(curveElement));
}

function curveElement(curve) {
  const { steps, values } = curve;
  const [first, last] = [steps[0], steps[steps.length - 1]];
  const least = Math.min(...values);
  const most = Math.max(...values);
  const x = (step) => 200 * (step - first) / (last - first || 1);
  const y = (value) => 42 - 40 * (value - least) / (most - least || 1);
  const figure = make('figure');
  const caption = make('figcaption');
  const reading = make('span', number(values[values.length - 1]));
  caption.append(make('span', visible(curve.name)), reading);
  const picture = svg('svg', { viewBox: '0 0 200 44', preserveAspectRatio: 'none', role: 'img' });
  picture.setAttribute('aria-label', `${curve.name}: from ${number(values[0])} to ${number(values[values.length - 1])}`);
  picture.append(svg('path', { d: 'M' + steps.map((step, i) => `${x(step).toFixed(1)},${y(values[i]).toFixed(1)}`).join('L') }));
  if (state.row >= 0) {
    const here = x(columns.step[state.row]);
    if (here >= 0 && here <= 200) picture.append(svg('line', { x1: here, x2: here, y1: 0, y2: 44 }));
  }
  const nearest = (event) => {
    const box = picture.getBoundingClientRect();
    const step = first + (last - first) * (event.clientX - box.left) / box.width;
    return steps.reduce((best, one, i) => (Math.abs(one - step) < Math.abs(steps[best] - step) ? i : best), 0);
  };
  picture.onmousemove = (event) => { const i = nearest(event); reading.textContent = `step ${steps[i]}: ${number(values[i])}`; };
  picture.onmouseleave = () => { reading.textContent = number(values[values.length - 1]); };
  picture.onclick = (event) => {
    const step = String(steps[nearest(event)]);
    state.filters = { ...state.filters, from: step, to: step };
    changed();
  };
  figure.append(caption, picture);
  return figure;
}
