const DIM = 0.2, LIT = 0.68; // how much of the colour covers the image at no weight, and what full weight adds
const NOTABLE = 4; // an even look is no peak: the colours end at so many times its weight, or higher
const MOST_PINS = 9;

// Drawing: the image in grey, and over it the map, stretched from cells to the whole image.

const pictures = data.images.map(() => null);

function overlayOf(map, largestWeight) {
  const [height, width] = data.layers[state.layer].grid.key_map;
  const top = Math.max(largestWeight, NOTABLE / data.layers[state.layer].keys_seen);
  // One more cell around, like the nearest: a shifted grid then covers the image, and smoothing has no dark rim.
  const canvas = new OffscreenCanvas(width + 2, height + 2), context = canvas.getContext("2d");
  const painted = context.createImageData(width + 2, height + 2);
  const near = (index, length) => Math.min(length - 1, Math.max(0, index - 1));
  for (let j = 0; j < (width + 2) * (height + 2); j++) {
    const row = near(Math.floor(j / (width + 2)), height), column = near(j % (width + 2), width);
    const part = Math.min(1, map[row * width + column] / top), colour = 3 * Math.round(255 * part);
    painted.data.set(colours.subarray(colour, colour + 3), 4 * j);
    painted.data[4 * j + 3] = state.overlay ? Math.round(255 * (DIM + LIT * part)) : 255;
  }
  context.putImageData(painted, 0, 0);
  return canvas;
}

function paint(canvas, side, map, top, marked) {
  const sharp = Math.round(side * Math.min(2, window.devicePixelRatio || 1));
  canvas.width = canvas.height = sharp;
  const context = canvas.getContext("2d"), picture = pictures[state.image];
  context.imageSmoothingEnabled = data.size > 96;
  context.drawImage(map ? picture.grey : picture.image, 0, 0, sharp, sharp);
  if (map) {
    context.imageSmoothingEnabled = state.smooth;
    const { grid, key_shift: shift } = data.layers[state.layer], [height, width] = grid.key_map;
    const left = (shift[1] - 1 / width) * sharp, above = (shift[0] - 1 / height) * sharp;
    context.drawImage(overlayOf(map, top), left, above, (1 + 2 / width) * sharp, (1 + 2 / height) * sharp);
  }
  if (!marked) return;
  const middle = centre(cell(marked)), x = middle.x * sharp, y = middle.y * sharp, arm = sharp * 0.035;
  for (const [line, colour] of [[sharp / 45, "rgb(0 0 0 / .7)"], [sharp / 100, "#fff"]]) {
    context.lineWidth = line;
    context.strokeStyle = colour;
    context.beginPath();
    context.moveTo(x - arm, y); context.lineTo(x + arm, y);
    context.moveTo(x, y - arm); context.lineTo(x, y + arm);
    context.stroke();
  }
}

const percent = (value) => `${(100 * value).toLocaleString("en", { maximumSignificantDigits: 2 })} %`;
const place = () => state.hover || state.at;

/** What a position gives to padding beyond the image, or to a class token. */
function elsewhere(map) {
  const rest = 1 - map.reduce((sum, weight) => sum + weight, 0);
  return rest >= 0.005 ? `\n${percent(rest)} outside` : "";
}

function drawPosition() {
  const { row, column } = cell(place());
  const maps = weights(state.image, state.layer, row, column);
  const most = largest(maps.map(largest));
  headTiles.forEach((tile, head) => {
    const own = largest(maps[head]);
    paint(tile.canvas, 190, maps[head], state.shared ? most : own, place());
    tile.peak.textContent = `max ${percent(own)}${elsewhere(maps[head])}`;
    tile.button.setAttribute("aria-pressed", String(state.head === head));
  });
  const shown = state.head === null ? null : state.head === "mean" ? mean(maps) : maps[state.head];
  paint(element("image"), element("stage").clientWidth || 400, shown, shown && (state.shared ? most : largest(shown)));
  const floor = NOTABLE / data.layers[state.layer].keys_seen;
  element("most").textContent = state.shared ? percent(Math.max(most, floor)) :
    `the largest weight of each map, at least ${percent(floor)}`;
  drawMarks(row, column);
}

/** The first and last row and column of the keys' map that a position sees; null where it sees all of it. */
function seenFrom(row, column) {
  const { window, grid } = data.layers[state.layer];
  if (window) return [window.rows.spans[row], window.columns.spans[column]];
  if (grid.blocks[0] * grid.blocks[1] === 1) return null;
  return blockOf(data.layers[state.layer], row, column).keys.map((first, axis) =>
    [Math.max(0, first), Math.min(grid.key_map[axis], first + grid.keys[axis]) - 1]);
}

function drawMarks(row, column) {
  const layer = data.layers[state.layer], { height, width, shift } = layer;
  const side = element("stage").clientWidth || 400;
  element("marks").setAttribute("viewBox", `0 0 ${side} ${side}`);
  const boxOf = ([top, bottom], [left, right], [rows, columns], moved) =>
    `x="${(left / columns + moved[1]) * side}" y="${(top / rows + moved[0]) * side}" ` +
    `width="${(right - left + 1) * side / columns}" height="${(bottom - top + 1) * side / rows}" rx="2"`;
  const box = boxOf([row, row], [column, column], [height, width], shift), lines = seenFrom(row, column);
  const seen = lines ? boxOf(...lines, layer.grid.key_map, layer.key_shift) : null;
  const around = seen ? `<rect class="under" ${seen}/><rect class="window" ${seen}/>` : "";
  const crosses = state.pins.map((pin, index) => {
    const x = pin.x * side, y = pin.y * side;
    const path = `M${x - 7} ${y}H${x + 7}M${x} ${y - 7}V${y + 7}`;
    const left = x > side - 26 ? -19 : 10, below = y < 24 ? 20 : -8;
    return `<path class="under" d="${path}"/><path class="over" d="${path}"/>` +
      `<text x="${x + left}" y="${y + below}">${index + 1}</text>`;
  });
  element("marks").innerHTML = `${around}<rect class="under" ${box}/><rect class="cell" ${box}/>${crosses.join("")}`;
  const covered = (index, length, moved) => { // the pixels whose middle lies in the cell
    const pixel = (edge) => Math.ceil(data.size * (edge / length + moved) - 0.5);
    const first = index === 0 ? 0 : pixel(index), last = index === length - 1 ? data.size - 1 : pixel(index + 1) - 1;
    return last > first ? `${first}-${last}` : String(first);
  };
  element("place").textContent =
    `row ${row + 1} of ${height}, column ${column + 1} of ${width}, ` +
    `pixels ${covered(row, height, shift[0])} and ${covered(column, width, shift[1])}`;
}

function drawPins() {
  element("comparison").hidden = state.pins.length === 0;
  element("clear").hidden = state.pins.length === 0;
  const table = element("pins");
  table.replaceChildren();
  if (state.pins.length === 0) return;
  const all = state.pins.map((pin) => {
    const { row, column } = cell(pin);
    return weights(state.image, state.layer, row, column);
  });
  const most = largest(all.flat().map(largest));
  const titles = table.insertRow();
  titles.append(heading(""));
  state.pins.forEach((pin, index) => {
    const title = heading("", "col"), remove = make("button", "×", "quiet");
    remove.title = `Remove pin ${index + 1}`;
    remove.setAttribute("aria-label", remove.title);
    remove.onclick = () => { state.pins.splice(index, 1); change("pins"); };
    title.append(make("span", String(index + 1), "number"), remove);
    titles.append(title);
  });
  for (let head = 0; head < data.layers[state.layer].heads; head++) {
    const line = table.insertRow();
    line.append(heading(`head ${head + 1}`, "row"));
    state.pins.forEach((pin, index) => {
      const canvas = document.createElement("canvas"), map = all[index][head];
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", `head ${head + 1} from pin ${index + 1}, at most ${percent(largest(map))}`);
      paint(canvas, 104, map, state.shared ? most : largest(map), pin);
      line.insertCell().append(canvas);
    });
  }
}

// What stands on the page besides.

function make(tag, text, name) {
  const made = document.createElement(tag);
  made.textContent = text;
  if (name) made.className = name;
  return made;
}

function heading(text, scope) {
  const made = make("th", text);
  if (scope) made.scope = scope;
  return made;
}

let headTiles = [];

function makeHeads() {
  const count = data.layers[state.layer].heads;
  if (headTiles.length === count) return;
  headTiles = Array.from({ length: count }, (_, head) => {
    const button = make("button", "", "tile"), caption = make("span", "", "caption");
    const canvas = document.createElement("canvas"), peak = make("span", "");
    caption.append(make("span", `head ${head + 1}`), peak);
    button.append(caption, canvas);
    button.title = "Lay this head over the large image";
    button.onclick = () => { state.head = state.head === head ? null : head; change("head"); };
    return { button, canvas, peak };
  });
  element("heads").replaceChildren(...headTiles.map((tile) => tile.button));
}

function makeLayers() {
  element("layers").replaceChildren(...data.layers.map((layer, index) => {
    const button = make("button", ""), coarse = layer.downsample ? ", halved" : layer.stride > 1 ? ", strided" : "";
    const { keys, key_map, blocks } = layer.grid, several = blocks[0] * blocks[1] > 1;
    const of = layer.window ? [layer.window.rows.longest, layer.window.columns.longest] : several ? keys : null;
    const pooled = key_map.join() === [layer.height, layer.width].join() ? "" : `, keys ${key_map.join(" × ")}`;
    const local = of ? `, window ${of.join(" × ")}` : "";
    button.append(make("span", layer.name, "name"), make("span", `${layer.height} × ${layer.width}${coarse}${pooled}${local}`, "size"));
    button.onclick = () => { state.layer = index; change("layer"); };
    return button;
  }));
}

function makeStrip() {
  if (data.images.length < 2) return;
  element("strip").replaceChildren(...data.images.map((image, index) => {
    const button = make("button", ""), picture = document.createElement("img");
    picture.src = image.png;
    picture.alt = button.title = image.name;
    if (data.size <= 96) picture.className = "pixelated";
    button.setAttribute("role", "option");
    button.append(picture);
    button.onclick = () => { state.image = index; change("image"); };
    return button;
  }));
}

/** Scroll a row of buttons, not the page, until the chosen one is in sight. */
function showChosen(row) {
  const chosen = row.querySelector('[aria-current="true"], [aria-selected="true"]');
  if (!chosen) return;
  const box = chosen.getBoundingClientRect(), sight = row.getBoundingClientRect();
  row.scrollLeft += Math.max(0, box.right - sight.right) - Math.max(0, sight.left - box.left);
}

function drawWords() {
  const layer = data.layers[state.layer], image = data.images[state.image];
  element("name").textContent = image.name;
  element("heading").textContent = `${layer.heads} heads of ${layer.name}`;
  element("even").textContent = percent(1 / layer.keys_seen);
  [...element("layers").children].forEach((button, index) =>
    button.setAttribute("aria-current", String(index === state.layer)));
  [...element("strip").children].forEach((button, index) =>
    button.setAttribute("aria-selected", String(index === state.image)));
  for (const name of ["layers", "strip"]) showChosen(element(name));
  element("prediction").hidden = image.top.length === 0;
  element("top").replaceChildren(...image.top.map(([name, probability]) => {
    const line = document.createElement("li");
    line.style.setProperty("--part", `${100 * probability}%`);
    line.append(make("span", name), make("span", `${(100 * probability).toFixed(1)} %`));
    return line;
  }));
  for (const name of ["overlay", "smooth", "shared"]) element(name).setAttribute("aria-pressed", String(state[name]));
  element("pin").disabled = state.pins.length >= MOST_PINS;
}

// A link restores image, layer, position, pins and head.

const number = (value) => String(Math.round(1e5 * value) / 1e5);
const point = ({ x, y }) => `${number(x)},${number(y)}`;

// Inside a notebook the page is a part of another, which the address belongs to.
const hasAddress = location.protocol !== "about:";

function hash() {
  const parts = { image: state.image + 1, layer: data.layers[state.layer].name, at: point(state.at) };
  if (state.pins.length) parts.pins = state.pins.map(point).join(";");
  if (state.head !== null) parts.head = state.head === "mean" ? "mean" : state.head + 1;
  return `#${Object.entries(parts).map(([name, value]) => `${name}=${value}`).join("&")}`;
}

function restore() {
  const parts = new URLSearchParams(location.hash.slice(1)); // decodes, and leaves what is malformed as it is
  const points = (text) => (text || "").split(";").map((pair) => pair.split(",").map(Number))
    .filter(([x, y]) => x >= 0 && x <= 1 && y >= 0 && y <= 1).map(([x, y]) => ({ x, y }));
  const image = Number(parts.get("image")) - 1, layer = data.layers.findIndex(({ name }) => name === parts.get("layer"));
  if (image in data.images) state.image = image;
  if (layer >= 0) state.layer = layer;
  [state.at] = [...points(parts.get("at")), state.at];
  state.pins = points(parts.get("pins")).slice(0, MOST_PINS);
  const head = Number(parts.get("head")) - 1;
  state.head = parts.get("head") === "mean" ? "mean" : head >= 0 && head < data.layers[state.layer].heads ? head : null;
}

// One way to change anything: set the state, then say what changed.

let due = null;
function change(what) {
  if (typeof state.head === "number" && state.head >= data.layers[state.layer].heads) state.head = null;
  if (what !== "hover" && hasAddress) history.replaceState(null, "", hash());
  if (what === "hover") {
    due = due || requestAnimationFrame(() => { due = null; drawPosition(); });
    return;
  }
  makeHeads();
  drawWords();
  drawPosition();
  if (what !== "at" && what !== "head") drawPins();
}

function moveTo(event, what) {
  const box = element("stage").getBoundingClientRect();
  const x = (event.clientX - box.left) / box.width, y = (event.clientY - box.top) / box.height;
  const inside = { x: Math.min(0.9999, Math.max(0, x)), y: Math.min(0.9999, Math.max(0, y)) };
  if (what === "hover") state.hover = inside;
  else { state.at = inside; state.hover = null; }
  change(what);
}

function step(dx, dy) {
  const { height, width } = data.layers[state.layer], { row, column } = cell(state.at);
  const clamp = (value, length) => Math.min(length - 1, Math.max(0, value));
  state.at = centre({ row: clamp(row + dy, height), column: clamp(column + dx, width) });
  state.hover = null;
  change("at");
}

function pin() {
  if (state.pins.length >= MOST_PINS) return;
  state.pins.push(centre(cell(place())));
  change("pins");
}

function cycle(name, by, length) {
  state[name] = (state[name] + by + length) % length;
  change(name);
}

function toggle(name) { state[name] = !state[name]; change(name); }
function showHead(head) { state.head = state.head === head ? null : head; change("head"); }

function setTheme(theme, keep) {
  document.documentElement.dataset.theme = theme;
  element("theme").textContent = theme === "dark" ? "Light" : "Dark";
  try { if (keep) localStorage.setItem("aaconv-theme", theme); } catch { /* a page from a file may have no storage */ }
}

function startTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let kept = null;
  try { kept = localStorage.getItem("aaconv-theme"); } catch { /* none */ }
  setTheme(kept || (dark.matches ? "dark" : "light"));
  dark.addEventListener("change", () => { if (!kept) setTheme(dark.matches ? "dark" : "light"); });
}
const otherTheme = () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark", true);

const keys = {
  ArrowLeft: () => step(-1, 0), ArrowRight: () => step(1, 0), ArrowUp: () => step(0, -1), ArrowDown: () => step(0, 1),
  "[": () => cycle("layer", -1, data.layers.length), "]": () => cycle("layer", 1, data.layers.length),
  ",": () => cycle("image", -1, data.images.length), ".": () => cycle("image", 1, data.images.length),
  p: pin, x: () => { state.pins = []; change("pins"); }, 0: () => showHead("mean"), t: otherTheme,
  m: () => toggle("overlay"), s: () => toggle("smooth"), c: () => toggle("shared"),
};

function listen() {
  const stage = element("stage");
  stage.addEventListener("pointermove", (event) => {
    if (event.pointerType === "mouse") moveTo(event, "hover");
    else if (event.buttons) moveTo(event, "at");
  });
  stage.addEventListener("pointerleave", () => { if (state.hover) { state.hover = null; change("hover"); } });
  stage.addEventListener("pointerdown", (event) => moveTo(event, "at"));
  stage.addEventListener("dblclick", pin);
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const digit = Number(event.key);
    const isHead = digit >= 1 && digit <= data.layers[state.layer].heads;
    const act = keys[event.key] || (isHead && (() => showHead(digit - 1)));
    if (!act) return;
    event.preventDefault();
    act();
  });
  element("pin").onclick = pin;
  element("clear").onclick = keys.x;
  element("theme").onclick = otherTheme;
  for (const name of ["overlay", "smooth", "shared"]) element(name).onclick = () => toggle(name);
  element("link").hidden = !hasAddress;
  element("link").onclick = async () => {
    try { await navigator.clipboard.writeText(location.href); element("link").textContent = "Copied"; }
    catch { element("link").textContent = "It is in the address bar"; }
    setTimeout(() => { element("link").textContent = "Copy link"; }, 1800);
  };
  addEventListener("hashchange", () => { restore(); change("image"); });
  addEventListener("resize", () => { drawPosition(); });
}

async function prepare(image) {
  const picture = new Image();
  picture.src = data.images[image].png;
  await picture.decode();
  const grey = new OffscreenCanvas(picture.width, picture.height), context = grey.getContext("2d");
  context.drawImage(picture, 0, 0);
  const pixels = context.getImageData(0, 0, picture.width, picture.height);
  for (let i = 0; i < pixels.data.length; i += 4) {
    const [red, green, blue] = pixels.data.subarray(i, i + 3), luma = 0.3 * red + 0.59 * green + 0.11 * blue;
    for (let c = 0; c < 3; c++) pixels.data[i + c] = 0.15 * pixels.data[i + c] + 0.85 * luma;
  }
  context.putImageData(pixels, 0, 0);
  pictures[image] = { image: picture, grey };
}

async function start() {
  element("title").textContent = `What ${data.title} attends to`;
  element("facts").textContent = data.facts.join(" · ");
  element("untrained").hidden = data.trained;
  element("version").textContent = data.version;
  element("precision").textContent =
    `The page holds the queries, keys and relative tables of each layer in 16 bits, or 32 where these are too few, ` +
    `and computes the weights itself. They differ from the network's own by at most ${percent(data.error)} of a row's largest weight.`;
  const legend = element("legend").getContext("2d");
  for (let i = 0; i < 256; i++) {
    legend.fillStyle = `rgb(${colours.slice(3 * i, 3 * i + 3).join(" ")})`;
    legend.fillRect(i, 0, 1, 1);
  }
  startTheme();
  makeLayers();
  makeStrip();
  const sharpness = data.layers.map((_, layer) =>
    data.images.reduce((sum, image) => sum + image.attention[layer].peak, 0));
  state.layer = sharpness.indexOf(largest(sharpness));
  restore();
  if (!location.hash.includes("at=")) {
    const [row, column] = data.images[state.image].attention[state.layer].focus;
    state.at = centre({ row, column });
  }
  await Promise.all(data.images.map((_, image) => prepare(image)));
  listen();
  change("image");
  window.aaconv = { data, state, weights, cell, ready: true };
}

start();
