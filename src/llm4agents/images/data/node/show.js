'use strict';
// What a value looks like to the host: a bundle of MIME types and their content, with bounds.

const { inspect, types } = require('node:util');

const TEXT_CHARS_MAX = 1 << 20;
const DATA_CHARS_MAX = 16 << 20;
const ALL_CHARS_MAX = 28 << 20;
const DISPLAY = Symbol.for('llm4agents.display');
const BINARY = /^(image\/(?!svg)|application\/pdf|audio\/|video\/)/;

function plain(value) {
  let text;
  try {
    text = inspect(value, { depth: 4, maxStringLength: TEXT_CHARS_MAX });
  } catch (error) {
    text = `[what it is cannot be shown: ${error?.message}]`;
  }
  return text.length > TEXT_CHARS_MAX ? `${text.slice(0, TEXT_CHARS_MAX)}… (cut)` : text;
}

// The bundle of a value that is displayed, with at least text/plain.
function bundle(value) {
  const data = {};
  if ((typeof value === 'object' && value !== null) || typeof value === 'function') {
    try {
      if (typeof value[DISPLAY] === 'function') Object.assign(data, checked(value[DISPLAY]()));
      else if (typeof value.toHTML === 'function') Object.assign(data, checked({ 'text/html': value.toHTML() }));
    } catch (error) {
      data['text/plain'] = `[its display failed: ${error?.message}]`;
    }
  }
  if (data['text/plain'] === undefined) data['text/plain'] = plain(value);
  return data;
}

// A bundle as `display({mime: content})` takes it; throws a TypeError for what is none.
function checked(given) {
  const data = {};
  let room = ALL_CHARS_MAX;
  const left = [];
  for (const [mime, content] of Object.entries(given ?? {})) {
    if (!/^[\w.+-]+\/[\w.+-]+$/.test(mime)) throw new TypeError(`${mime} is not a MIME type`);
    let value = content;
    if (types.isUint8Array(value)) value = Buffer.from(value).toString(BINARY.test(mime) ? 'base64' : 'utf8');
    if (mime === 'application/json') value = JSON.parse(JSON.stringify(value) ?? 'null');
    else if (typeof value !== 'string') value = String(value);
    const size = typeof value === 'string' ? value.length : JSON.stringify(value).length;
    const most = mime.startsWith('text/') ? TEXT_CHARS_MAX : DATA_CHARS_MAX;
    if (size > most || size > room) {
      left.push(mime);
      continue;
    }
    room -= size;
    data[mime] = value;
  }
  if (left.length) data['text/plain'] = `${data['text/plain'] ?? ''}[too large, left out: ${left.join(', ')}]`;
  return data;
}

// Whether `display` was given a bundle and not a value.
function isBundle(value) {
  if (typeof value !== 'object' || value === null || Array.isArray(value)) return false;
  const keys = Object.keys(value);
  return keys.length > 0 && keys.every((key) => /^[a-z]+\/[\w.+-]+$/.test(key));
}

// Name, message and traceback of what was thrown.
function failure(thrown) {
  if (!types.isNativeError(thrown) && !(thrown instanceof Error)) {
    const text = plain(thrown);
    return { name: 'Error', value: text, traceback: `Uncaught ${text}` };
  }
  let name = 'Error';
  let value = '';
  let trace = '';
  try {
    name = String(thrown.name || 'Error');
    value = String(thrown.message ?? '');
    trace = plain(thrown);
  } catch {
    // A getter of its own that fails.
  }
  // Whoever wrote the cell has no interest in how we came to call it.
  let ours = false;
  const lines = trace.split('\n').filter((line) => {
    const call = /^\s+at /.test(line);
    ours = call && (ours || line.includes(__dirname) || line.includes('node:inspector:'));
    return !ours;
  });
  return { name, value: value.slice(0, TEXT_CHARS_MAX), traceback: lines.join('\n') };
}

module.exports = { bundle, checked, isBundle, failure, plain };
