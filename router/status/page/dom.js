// Elements and words. Text from the cluster or the model only ever becomes text: nothing here parses markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

// `el("p", {class: "empty"}, "text", child)`; numbers and texts become text nodes, null and undefined nothing.
export function el(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) if (value !== null && value !== undefined) element.setAttribute(name, value);
  element.append(...children.flat().filter((child) => child !== null && child !== undefined).map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

// Touching what has not changed would move focus and selection, and be read out again.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function count(value) {
  return Math.round(value).toLocaleString("en-US");
}

export function rate(value) {
  if (value === 0) return "0";
  if (value < 10) return value.toFixed(1);
  return value < 10000 ? count(value) : `${(value / 1000).toFixed(1)}k`;
}

export function milliseconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 10) return `${value.toFixed(1)} ms`;
  if (value < 1000) return `${Math.round(value)} ms`;
  return `${(value / 1000).toFixed(value < 10000 ? 2 : 1)} s`;
}

export function seconds(value) {
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 60) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  return value < 3600 ? `${Math.floor(value / 60)} min` : `${Math.floor(value / 3600)} h`;
}

export function bytes(value) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) [value, unit] = [value / 1000, unit + 1];
  return `${unit && value < 10 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

export function percent(share) {
  return `${share > 0 && share < 0.1 ? (share * 100).toFixed(1) : Math.round(share * 100)} %`;
}

export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

// The children of `list` become one element per item, in order. `make(item)` gives an element with an `update(item)`;
// elements whose key is still there stay what they are, so a selection or the focus in them survives.
export function showEach(list, items, keyOf, make) {
  const known = list.known ?? (list.known = new Map());
  const wanted = new Map(items.map((item) => [keyOf(item), item]));
  for (const [key, element] of known) if (!wanted.has(key)) known.delete(key), element.remove();
  let before = null;
  for (const [key, item] of wanted) {
    let element = known.get(key);
    if (!element) known.set(key, (element = make(item)));
    element.update?.(item);
    const place = before ? before.nextSibling : list.firstChild;
    if (place !== element) list.insertBefore(element, place);
    before = element;
  }
}

// `content` when there is something to show, else a sentence that says what would be here.
export function showOr(container, hasContent, content, sentence) {
  const shown = hasContent ? content : (container.nothing ??= el("p", { class: "empty" }));
  if (!hasContent) setText(shown, sentence);
  if (container.firstChild !== shown || container.childNodes.length > 1) container.replaceChildren(shown);
}
