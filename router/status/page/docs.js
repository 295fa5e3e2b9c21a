// What /openapi.json says, to be read: each operation with its parameters, the fields of its body, and its answers.
import { byId, el, setText } from "./dom.js";

const METHODS = ["get", "post", "put", "patch", "delete"];

// A schema in a few words. References are shown by their names, which the tables of bodies explain one level deep.
function inWords(schema) {
  if (!schema || Object.keys(schema).length === 0) return "anything";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  const branches = schema.anyOf ?? schema.oneOf;
  if (branches) return [...new Set(branches.map(inWords))].join(" | ");
  if (schema.type === "array") return `list of ${inWords(schema.items)}`;
  return [schema.type].flat().join(" | ") + bounds(schema);
}

function bounds(schema) {
  const low = schema.minimum ?? schema.exclusiveMinimum;
  const high = schema.maximum ?? schema.exclusiveMaximum;
  if (low === undefined && high === undefined) return "";
  const open = schema.exclusiveMinimum === undefined ? "[" : "(";
  const close = schema.exclusiveMaximum === undefined ? "]" : ")";
  return ` in ${open}${low ?? "-∞"}, ${high ?? "∞"}${close}`;
}

function table(heads, rows) {
  if (!rows.length) return null;
  const cells = (row) => el("tr", {}, row.map((cell) => el("td", {}, cell)));
  return el("table", {}, el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))), el("tbody", {}, rows.map(cells)));
}

function fieldsOf(schema, schemas) {
  const whole = schema.$ref ? schemas[schema.$ref.split("/").pop()] : schema;
  const required = new Set(whole?.required ?? []);
  return Object.entries(whole?.properties ?? {}).map(([name, field]) => [
    el("code", {}, name), inWords(field), required.has(name) ? "required" : "", field.description ?? "",
  ]);
}

function parameters(operation) {
  return (operation.parameters ?? []).map((one) => [
    el("code", {}, one.name), one.in, inWords(one.schema), one.required ? "required" : "", one.description ?? "",
  ]);
}

function answers(operation) {
  return Object.entries(operation.responses).flatMap(([status, answer]) => {
    const content = Object.entries(answer.content ?? {});
    const rows = content.length ? content : [["", {}]];
    return rows.map(([media, { schema, itemSchema }]) => [
      status, media, schema ? inWords(schema) : itemSchema ? "events" : "", answer.description ?? "",
    ]);
  });
}

function shown(method, path, operation, schemas) {
  const bodies = Object.entries(operation.requestBody?.content ?? {});
  return el("details", { class: "operation", id: operation.operationId },
    el("summary", {}, el("span", { class: "method" }, method.toUpperCase()), el("code", {}, path), ` ${operation.description ?? ""}`),
    el("p", {}, operation.security.length ? "Needs an API key." : "Needs no API key here."),
    table(["Parameter", "In", "Value", "", ""], parameters(operation)),
    bodies.map(([media, { schema }]) => [el("h3", {}, `Body: ${media}`), table(["Field", "Value", "", ""], fieldsOf(schema, schemas))]).flat(),
    el("h3", {}, "Answers"),
    table(["Status", "Media type", "Content", ""], answers(operation)));
}

async function load(key) {
  const answer = await fetch("/openapi.json", { headers: key ? { Authorization: `Bearer ${key}` } : {} });
  if (answer.status === 401) {
    byId("key-form").hidden = false;
    return setText(byId("state"), key ? "This key is not known here." : "The description of this API needs a key.");
  }
  if (!answer.ok) return setText(byId("state"), `The router answered with ${answer.status}.`);
  const found = await answer.json();
  byId("key-form").hidden = true;
  setText(byId("version"), found.info.version);
  setText(byId("state"), "");
  const operations = Object.entries(found.paths).flatMap(([path, one]) => METHODS.filter((method) => one[method]).map((method) => shown(method, path, one[method], found.components.schemas)));
  byId("operations").replaceChildren(...operations);
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = byId("key").value.trim();
  byId("key").value = "";
  load(key).catch(() => setText(byId("state"), "The router cannot be reached."));
});

load("").catch(() => setText(byId("state"), "The router cannot be reached."));
