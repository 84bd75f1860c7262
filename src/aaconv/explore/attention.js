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

/** Does a line of the map see another one, in a layer that attends over windows? */
function sees({ step, spans }, here, there) {
  const [first, last] = spans[here];
  return there >= first && there <= last && (there - here) % step === 0;
}

/** The block of queries that a cell lies in, and where its keys begin on their map. */
function blockOf({ grid }, row, column) {
  const place = [Math.floor(row / grid.queries[0]), Math.floor(column / grid.queries[1])];
  return { number: place[0] * grid.blocks[1] + place[1], keys: place.map((n, axis) => n * grid.step[axis] - grid.halo[axis]) };
}

/** The weights that the position in `row`, `column` of a layer's map gives to all cells of its keys' map: one
 *  Float32Array per head. Keys that are not on it, padding or a class token, take what is missing to 1. */
function weights(image, layer, row, column) {
  const { heads, depth, window, grid } = data.layers[layer];
  const { q, k, rel_h, rel_w, rows, columns, tables } = factors(image, layer);
  const [keyRows, keyColumns] = grid.keys, [mapRows, mapColumns] = grid.key_map;
  const block = blockOf(data.layers[layer], row, column), blocks = grid.blocks[0] * grid.blocks[1];
  const inBlock = [row % grid.queries[0], column % grid.queries[1]];
  const queries = grid.queries[0] * grid.queries[1], keys = grid.leading + keyRows * keyColumns;
  const dot = (a, from, b, other) => {
    let sum = 0;
    for (let d = 0; d < depth; d++) sum += a[from + d] * b[other + d];
    return sum;
  };
  return Array.from({ length: heads }, (_, head) => {
    const number = (head * blocks + block.number) * queries + inBlock[0] * grid.queries[1] + inBlock[1];
    const query = number * depth, first = (head * blocks + block.number) * keys * depth;
    const table = tables > 1 ? head : 0;
    const bias = (rel, lines, length, here, axis) => Float32Array.from({ length }, (_, there) => {
      if (lines) return lines[number * length + there];
      if (axis && !sees(axis, here, there)) return -Infinity;
      const steps = (there - here) / (axis ? axis.step : 1), longest = axis ? axis.longest : length;
      return tables ? dot(q, query, rel, (table * (2 * longest - 1) + steps + longest - 1) * depth) : 0;
    });
    const byRow = bias(rel_h, rows, keyRows, inBlock[0], window?.rows);
    const byColumn = bias(rel_w, columns, keyColumns, inBlock[1], window?.columns);
    const result = new Float32Array(keys), shown = new Float32Array(mapRows * mapColumns);
    let most = -Infinity;
    for (let j = 0; j < keys; j++) {
      const place = j - grid.leading;
      result[j] = dot(q, query, k, first + j * depth);
      if (place >= 0) result[j] += byRow[Math.floor(place / keyColumns)] + byColumn[place % keyColumns];
      if (result[j] > most) most = result[j];
    }
    let sum = 0;
    for (let j = 0; j < keys; j++) sum += result[j] = Math.exp(result[j] - most);
    for (let j = grid.leading; j < keys; j++) {
      const y = block.keys[0] + Math.floor((j - grid.leading) / keyColumns);
      const x = block.keys[1] + (j - grid.leading) % keyColumns;
      if (y >= 0 && y < mapRows && x >= 0 && x < mapColumns) shown[y * mapColumns + x] = result[j] / sum;
    }
    return shown;
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
