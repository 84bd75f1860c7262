const element = (id) => document.getElementById(id);
const data = JSON.parse(element("data").textContent);

const state = {
  image: 0, layer: 0, at: { x: 0.5, y: 0.5 }, hover: null, pins: [], head: null,
  overlay: true, smooth: false, shared: false,
};

// The attention: queries, keys and tables from the text of the page, and the paper's equation.

const bytes = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
const colours = bytes(data.colours);
const unpacked = new Map();

function factors(image, layer) {
  const key = `${image}/${layer}`;
  if (!unpacked.has(key)) unpacked.set(key, unpack(data.images[image].attention[layer]));
  return unpacked.get(key);
}

function unpack(packed) {
  const buffer = bytes(packed.text).buffer;
  const numbers = packed.kind === "int16" ? new Int16Array(buffer) : new Float32Array(buffer);
  const parts = {};
  let start = 0;
  for (const [name, [heads, rows, depth]] of Object.entries(packed.shapes)) {
    const size = rows * depth, scales = packed.scales[name], first = start;
    parts[name] = Float32Array.from({ length: heads * size }, (_, i) =>
      numbers[first + i] * scales[Math.floor(i / size)]);
    start += heads * size;
  }
  parts.tables = packed.shapes.rel_h ? packed.shapes.rel_h[0] : 0; // one for all heads, one per head, or none
  return parts;
}

/** The weights that the position in `row`, `column` of a layer's map gives to all others: one Float32Array a head. */
function weights(image, layer, row, column) {
  const { heads, height, width, depth } = data.layers[layer];
  const { q, k, rel_h, rel_w, tables } = factors(image, layer);
  const pixels = height * width;
  const dot = (a, from, b, other) => {
    let sum = 0;
    for (let d = 0; d < depth; d++) sum += a[from + d] * b[other + d];
    return sum;
  };
  return Array.from({ length: heads }, (_, head) => {
    const query = (head * pixels + row * width + column) * depth;
    const table = tables > 1 ? head : 0;
    const distance = (rel, length, here) => Float32Array.from({ length }, (_, there) =>
      tables ? dot(q, query, rel, (table * (2 * length - 1) + there - here + length - 1) * depth) : 0);
    const byRow = distance(rel_h, height, row), byColumn = distance(rel_w, width, column);
    const result = new Float32Array(pixels);
    let most = -Infinity;
    for (let j = 0; j < pixels; j++) {
      result[j] = dot(q, query, k, (head * pixels + j) * depth) + byRow[Math.floor(j / width)] + byColumn[j % width];
      if (result[j] > most) most = result[j];
    }
    let sum = 0;
    for (let j = 0; j < pixels; j++) sum += result[j] = Math.exp(result[j] - most);
    for (let j = 0; j < pixels; j++) result[j] /= sum;
    return result;
  });
}

const largest = (values) => values.reduce((a, b) => Math.max(a, b), 0);
const mean = (maps) => maps[0].map((_, j) => maps.reduce((sum, map) => sum + map[j], 0) / maps.length);

/** The cell of the chosen layer's map that a position of the image (0..1) lies in; edge cells reach to the edges. */
function cell({ x, y }) {
  const { height, width, shift } = data.layers[state.layer];
  const inside = (part, length) => Math.min(length - 1, Math.max(0, Math.floor(part * length)));
  return { row: inside(y - shift[0], height), column: inside(x - shift[1], width) };
}

/** The middle of a cell as a position of the image. */
function centre({ row, column }) {
  const { height, width, shift } = data.layers[state.layer];
  const inside = (part) => Math.min(0.9999, Math.max(0, part));
  return { x: inside((column + 0.5) / width + shift[1]), y: inside((row + 0.5) / height + shift[0]) };
}
