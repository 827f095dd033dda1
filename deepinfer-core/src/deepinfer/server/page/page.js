// The page at /: a chat, a schema box that checks its result while it comes, the engine's numbers.
// No build step and nothing from elsewhere. What models and servers say is only ever set as text.
"use strict";

const $ = (id) => document.getElementById(id);
const EXAMPLE = {
  type: "object",
  properties: {
    category: { enum: ["hardware", "software", "network"] },
    urgency: { type: "integer", minimum: 1, maximum: 5 },
    place: { type: ["string", "null"], maxLength: 40 },
  },
  required: ["category", "urgency", "place"],
  additionalProperties: false,
};

// Talking to the server.

async function* events(path, body, signal) {
  const response = await fetch(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
  if (!response.ok) throw new Error(await complaint(response));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").find((line) => line.startsWith("data: "));
      if (!data || data === "data: [DONE]") continue;
      const event = JSON.parse(data.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

async function complaint(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status}.`;
  }
}

// While a form's request runs, its button is off and its stop button on.
function runs(go, stop, work) {
  const control = new AbortController();
  go.disabled = true;
  stop.disabled = false;
  stop.onclick = () => control.abort();
  return work(control.signal).finally(() => {
    go.disabled = false;
    stop.disabled = true;
  });
}

// The chat.

const talk = [];

function bubble(role) {
  const box = document.createElement("div");
  box.className = `said ${role}`;
  $("talk").append(box);
  return box;
}

function part(box, kind) {
  if (box.lastChild?.className !== kind) {
    const span = document.createElement("span");
    span.className = kind;
    box.append(span);
  }
  return box.lastChild;
}

async function say(signal) {
  const text = $("message").value;
  talk.push({ role: "user", content: text });
  bubble("user").textContent = text;
  $("message").value = "";
  const box = bubble("assistant");
  let said = "";
  try {
    const body = {
      messages: talk,
      temperature: Number($("temperature").value),
      max_tokens: Number($("length").value),
    };
    for await (const event of events("v1/chat/completions", body, signal)) {
      const delta = event.choices[0]?.delta ?? {};
      if (delta.reasoning_content) part(box, "thought").append(delta.reasoning_content);
      if (delta.content) {
        part(box, "words").append(delta.content);
        said += delta.content;
      }
      $("talk").scrollTop = $("talk").scrollHeight;
    }
  } catch (why) {
    if (why.name !== "AbortError") bubble("error").textContent = why.message;
  }
  if (said) talk.push({ role: "assistant", content: said });
  else talk.pop();
  box.dataset.done = "yes";
}

// The schema box.

async function make(signal) {
  const result = $("result");
  result.textContent = "";
  delete result.dataset.done;
  let schema;
  try {
    schema = JSON.parse($("schema").value);
  } catch (why) {
    return tell([[`The schema is no JSON: ${why.message}`, "bad"]]);
  }
  const rule = { structured_output: { schema_type: "json", schema } };
  const body = { prompt: $("prompt").value, max_tokens: 400, ...($("force").checked ? rule : {}) };
  let ended = null;
  try {
    for await (const event of events("v1/generate", body, signal)) {
      if (event.text) result.append(event.text);
      ended = event.finish_reason ?? ended;
      tell(verdict(result.textContent, schema, null));
    }
    tell(verdict(result.textContent, schema, ended));
  } catch (why) {
    tell([[why.name === "AbortError" ? "Stopped." : why.message, "bad"]]);
  }
  result.dataset.done = "yes";
}

function tell(lines) {
  $("verdict").replaceChildren(
    ...lines.map(([text, kind]) => {
      const item = document.createElement("li");
      item.textContent = text;
      item.className = kind;
      return item;
    }),
  );
}

// What can be said of a text: [sentence, good or bad or empty] each.
function verdict(text, schema, ended) {
  let value;
  try {
    value = JSON.parse(text);
  } catch {
    if (!beginsJson(text)) return [["This is no JSON.", "bad"]];
    if (ended === null) return [["So far the beginning of JSON.", ""]];
    return [[`Cut off (${ended}): not yet JSON.`, "bad"]];
  }
  const found = { wrong: [], unknown: new Set() };
  check(value, schema, "$", found);
  const lines = found.wrong.map((line) => [line, "bad"]);
  if (!lines.length) lines.push(["Valid.", "good"]);
  if (found.unknown.size) lines.push([`Not checked here: ${[...found.unknown].join(", ")}.`, ""]);
  return lines;
}

// Whether a text can still become one JSON value. Between tokens it looks only at what is open.
function beginsJson(text) {
  const STRING = /^"(?:[^"\\\u0000-\u001f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"/;
  const OPEN = /^"(?:[^"\\\u0000-\u001f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*(?:\\(?:u[0-9a-fA-F]{0,3})?)?$/;
  const NUMBER = /^-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?/;
  const NUMBER_OPEN = /^-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:[eE][+-]?[0-9]*)?)?$/;
  const open = []; // "{" or "[" each
  let rest = text.trimStart();
  let want = "value"; // value, first (value or ]), key, firstKey (key or }), colon, next, end
  while (rest) {
    const c = rest[0];
    if (want === "end") return false;
    if (want === "next") {
      const top = open.at(-1);
      if (c === ",") want = top === "{" ? "key" : "value";
      else if (c === (top === "{" ? "}" : "]")) {
        open.pop();
        want = open.length ? "next" : "end";
      } else return false;
      rest = rest.slice(1).trimStart();
      continue;
    }
    if (want === "colon") {
      if (c !== ":") return false;
      want = "value";
      rest = rest.slice(1).trimStart();
      continue;
    }
    if ((want === "first" && c === "]") || (want === "firstKey" && c === "}")) {
      open.pop();
      want = open.length ? "next" : "end";
      rest = rest.slice(1).trimStart();
      continue;
    }
    const isKey = want === "key" || want === "firstKey";
    if (c === '"') {
      const whole = STRING.exec(rest);
      if (!whole) return OPEN.test(rest);
      rest = rest.slice(whole[0].length).trimStart();
      want = isKey ? "colon" : open.length ? "next" : "end";
      continue;
    }
    if (isKey) return false;
    if (c === "{" || c === "[") {
      open.push(c);
      want = c === "{" ? "firstKey" : "first";
      rest = rest.slice(1).trimStart();
      continue;
    }
    const word = ["true", "false", "null"].find((w) => w.startsWith(rest) || rest.startsWith(w));
    const length = word ? Math.min(word.length, rest.length) : (NUMBER.exec(rest)?.[0].length ?? 0);
    if (!word && NUMBER_OPEN.test(rest)) return true;
    if (!length) return false;
    if (word && rest.length < word.length) return true;
    rest = rest.slice(length).trimStart();
    want = open.length ? "next" : "end";
  }
  return true;
}

// A small validator. A keyword that it does not know is named, never passed over in silence.

const TYPES = {
  object: (v) => v !== null && typeof v === "object" && !Array.isArray(v),
  array: Array.isArray,
  string: (v) => typeof v === "string",
  number: (v) => typeof v === "number",
  integer: Number.isInteger,
  boolean: (v) => typeof v === "boolean",
  null: (v) => v === null,
};
const same = (a, b) => canonical(a) === canonical(b);
const canonical = (v) =>
  JSON.stringify(v, (_, x) =>
    TYPES.object(x) ? Object.fromEntries(Object.entries(x).sort(([a], [b]) => (a < b ? -1 : 1))) : x,
  );
const fits = (v, schema) => {
  const found = { wrong: [], unknown: new Set() };
  check(v, schema, "", found);
  return !found.wrong.length;
};
const onlyFor = (kind, test) => (v, rule) => !TYPES[kind](v) || test(v, rule);
const RULES = {
  type: (v, rule) => [rule].flat().some((name) => TYPES[name]?.(v)),
  enum: (v, rule) => rule.some((one) => same(one, v)),
  const: (v, rule) => same(rule, v),
  minimum: onlyFor("number", (v, rule) => v >= rule),
  maximum: onlyFor("number", (v, rule) => v <= rule),
  exclusiveMinimum: onlyFor("number", (v, rule) => v > rule),
  exclusiveMaximum: onlyFor("number", (v, rule) => v < rule),
  minLength: onlyFor("string", (v, rule) => [...v].length >= rule),
  maxLength: onlyFor("string", (v, rule) => [...v].length <= rule),
  pattern: onlyFor("string", (v, rule) => new RegExp(rule, "u").test(v)),
  minItems: onlyFor("array", (v, rule) => v.length >= rule),
  maxItems: onlyFor("array", (v, rule) => v.length <= rule),
  uniqueItems: onlyFor("array", (v, rule) => !rule || new Set(v.map(canonical)).size === v.length),
  required: onlyFor("object", (v, rule) => rule.every((name) => Object.hasOwn(v, name))),
  anyOf: (v, rule) => rule.some((one) => fits(v, one)),
  oneOf: (v, rule) => rule.filter((one) => fits(v, one)).length === 1,
  allOf: (v, rule) => rule.every((one) => fits(v, one)),
  not: (v, rule) => !fits(v, rule),
};
const SILENT = ["title", "description", "default", "examples", "$schema", "$id", "$comment",
  "properties", "additionalProperties", "items"];

function check(value, schema, path, found) {
  if (schema === true) return;
  if (schema === false) {
    found.wrong.push(`${path} may not be there.`);
    return;
  }
  for (const [name, rule] of Object.entries(schema)) {
    if (Object.hasOwn(RULES, name)) {
      if (!RULES[name](value, rule)) found.wrong.push(`${path}: ${name} ${JSON.stringify(rule)}`);
    } else if (!SILENT.includes(name)) found.unknown.add(name);
  }
  if (TYPES.object(value)) {
    for (const [key, inner] of Object.entries(value)) {
      const known = schema.properties ?? {};
      const rule = Object.hasOwn(known, key) ? known[key] : (schema.additionalProperties ?? true);
      check(inner, rule, `${path}.${key}`, found);
    }
  } else if (Array.isArray(value) && schema.items !== undefined) {
    value.forEach((inner, i) => check(inner, schema.items, `${path}[${i}]`, found));
  }
}

// The engine's numbers.

const P = "deepinfer_";
let before = null;

function readMetrics(text) {
  const found = { at: performance.now() };
  for (const line of text.split("\n")) {
    if (!line || line[0] === "#" || line.includes("{")) continue;
    const [name, value] = line.split(" ");
    found[name] = Number(value);
  }
  return found;
}

function rate(now, name) {
  if (!before) return "–";
  return ((now[P + name] - before[P + name]) / ((now.at - before.at) / 1000)).toFixed(1);
}

function mean(now, name) {
  const count = now[`${P}${name}_count`];
  return count ? `${((1000 * now[`${P}${name}_sum`]) / count).toFixed(1)} ms` : "–";
}

function share(part, whole) {
  return whole ? `${((100 * part) / whole).toFixed(0)} %` : "–";
}

function show(now) {
  const pages = now[`${P}kv_pages`];
  const rows = {
    Running: now[`${P}requests_running`],
    Waiting: now[`${P}requests_waiting`],
    "Output tokens": now[`${P}output_tokens_total`],
    "Tokens of ended requests per second": rate(now, "output_tokens_total"),
    "Time to first token (mean)": mean(now, "time_to_first_token_seconds"),
    "Between tokens (mean)": mean(now, "inter_token_latency_seconds"),
    "KV pages in use": share(pages - now[`${P}kv_pages_free`], pages),
    "Prompt tokens from the cache": share(
      now[`${P}cached_prompt_tokens_total`],
      now[`${P}prompt_tokens_total`],
    ),
    Preemptions: now[`${P}engine_preemptions_total`],
    Steps: now[`${P}engine_steps_total`],
  };
  const lines = Object.entries(rows).map(([name, value]) => {
    const row = document.createElement("tr");
    for (const text of [name, String(value ?? "–")]) row.insertCell().textContent = text;
    return row;
  });
  $("numbers").replaceChildren(...lines);
}

async function look() {
  try {
    const [metrics, ready] = await Promise.all([fetch("metrics"), fetch("ready")]);
    $("state").textContent = (await ready.json()).status;
    $("state").className = ready.ok ? "good" : "bad";
    const now = readMetrics(await metrics.text());
    show(now);
    before = now;
  } catch {
    $("state").textContent = "unreachable";
    $("state").className = "bad";
  }
  setTimeout(look, 1000);
}

async function begin() {
  $("schema").value = JSON.stringify(EXAMPLE, null, 2);
  $("chat-form").onsubmit = (event) => {
    event.preventDefault();
    runs($("send"), $("stop"), say);
  };
  $("shape-form").onsubmit = (event) => {
    event.preventDefault();
    runs($("make"), $("halt"), make);
  };
  $("message").onkeydown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!$("send").disabled) $("chat-form").requestSubmit();
    }
  };
  $("forget").onclick = () => {
    talk.length = 0;
    $("talk").replaceChildren();
  };
  look();
  const response = await fetch("v1/models");
  if (response.ok) $("model").textContent = (await response.json()).data[0].id;
}

begin();
