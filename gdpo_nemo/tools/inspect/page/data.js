// What lies beside the page: scripts, loaded when they are needed, of which the last few are kept.
const KEPT = 6;
const arrived = new Map();
const shards = new Map();
let version = '';

window.gdpoData = (name, value) => arrived.get(name)?.(value);

function load(name) {
  return new Promise((resolve, reject) => {
    const script = document.createElement('script');
    const end = (action, value) => {
      arrived.delete(name);
      script.remove();
      action(value);
    };
    arrived.set(name, (value) => end(resolve, value));
    script.onload = () => arrived.has(name) && end(reject, new Error(`data/${name}.js holds something else`));
    script.onerror = () => end(reject, new Error(`data/${name}.js cannot be loaded`));
    script.src = `data/${name}.js?${version}`;
    document.head.append(script);
  });
}

// One at a time, each once: two readers of one shard wait for the same script.
function shard(name) {
  let found = shards.get(name);
  shards.delete(name);
  if (!found) {
    found = load(name);
    found.catch(() => shards.delete(name));
  }
  shards.set(name, found);
  while (shards.size > KEPT) shards.delete(shards.keys().next().value);
  return found;
}

const ARRAYS = { uint8: Uint8Array, uint16: Uint16Array, int32: Int32Array, float32: Float32Array };

function unpack(text, kind) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return new ARRAYS[kind](bytes.buffer);
}

// Place of the last start that is not behind `row`.
function placeIn(starts, row) {
  let low = 0;
  let high = starts.length;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (starts[middle] <= row) low = middle;
    else high = middle;
  }
  return low;
}

const shardName = (kind, place) => `${kind}-${String(place).padStart(4, '0')}`;

async function textOf(row) {
  const place = placeIn(index.starts[0], row);
  const found = await shard(shardName('text', place));
  const at = row - index.starts[0][place];
  const prompt = found.promptOf[at];
  const keys = ['completion', 'detail', 'extra', 'rewards', 'terms', 'verdicts', 'advantage', 'version', 'spans', 'images'];
  return { id: found.ids[prompt], prompt: found.prompts[prompt], rubric: found.rubrics[found.rubricOf[at]], ...Object.fromEntries(keys.map((k) => [k, found[k][at]])) };
}

// The images of a sample, with the places of their tokens. Those of the prompt start before 0.
async function imagesOf(places) {
  const found = [];
  for (let i = 0; i < (places || []).length; i += 3) {
    const place = placeIn(index.starts[2], places[i]);
    const [sha256, width, height, png] = (await shard(shardName('images', place)))[places[i] - index.starts[2][place]];
    found.push({ sha256, width, height, png, start: places[i + 1], tokens: places[i + 2] });
  }
  return found;
}

async function tokensOf(row) {
  const place = placeIn(index.starts[1], row);
  const found = await shard(shardName('tokens', place));
  if (!found.unpacked) {
    const lengths = unpack(found.lengths, 'int32');
    const starts = new Int32Array(lengths.length + 1);
    lengths.forEach((length, i) => (starts[i + 1] = starts[i] + length));
    found.unpacked = {
      starts,
      ids: unpack(found.ids, 'int32'),
      logprobs: unpack(found.logprobs, 'float32'),
      trainer: found.trainer ? unpack(found.trainer, 'float32') : null,
      entropy: found.entropy ? unpack(found.entropy, 'float32') : null,
      written: unpack(found.written, 'uint8'),
    };
    for (const name of ['lengths', 'ids', 'logprobs', 'trainer', 'entropy', 'written']) delete found[name];
  }
  const all = found.unpacked;
  const at = row - index.starts[1][place];
  const cut = (values) => values && values.subarray(all.starts[at], all.starts[at + 1]);
  return { ids: cut(all.ids), logprobs: cut(all.logprobs), trainer: cut(all.trainer), entropy: cut(all.entropy), written: cut(all.written) };
}

let index;
let columns;
let snippets = [];
let vocabulary = new Map();

async function loadIndex() {
  index = await load('index');
  columns = Object.fromEntries(Object.entries(index.columns).map(([name, [kind, text]]) => [name, unpack(text, kind)]));
  index.columns = null;
  shards.clear();
}

// After the list is there: it can be read without.
async function loadTexts() {
  snippets = await load('snippets');
  const found = await load('vocabulary');
  const ids = unpack(found.ids, 'int32');
  vocabulary = new Map(found.pieces.map((piece, place) => [ids[place], piece]));
}
