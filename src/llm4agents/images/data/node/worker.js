'use strict';
// One context: a process that evaluates cells and says what comes of them. Its service is its only parent.
//
// Cells are evaluated by V8's own REPL mode (top-level await, `const` and `let` that can be declared again) over
// an inspector session of this very thread; another thread (watch.js) can end them. Everything a cell says goes
// through descriptor 4 in order, written by this thread alone.

const fs = require('node:fs');
const inspector = require('node:inspector');
const { builtinModules, createRequire } = require('node:module');
const net = require('node:net');
const path = require('node:path');
const { StringDecoder } = require('node:string_decoder');
const { promiseHooks } = require('node:v8');
const vm = require('node:vm');
const { Worker } = require('node:worker_threads');
const random = require('./random');
const show = require('./show');
const { frame, IMPORT, pieces, Reader, REQUEST_BYTES_MAX } = require('./wire');

const COMMANDS_FD = 3;
const EVENTS_FD = 4;
const BOOT_ID = '/run/llm4agents/boot-id';

const CAUSES = [null, 'interrupt', 'timeout'];

const shared = new SharedArrayBuffer(12);
const generation = new Int32Array(shared, 0, 1); // of random state
const cause = new Int32Array(shared, 4, 1); // why watch.js ends a cell: an index of CAUSES
const answered = new Int32Array(shared, 8, 1); // the cell that watch.js asked to be ended, once it is
random.install(generation);
const session = new inspector.Session();
session.connect();
let bootId = readBootId();
let running = null; // the cell under way: {count, restore}

// -- what is said ---------------------------------------------------------------------------------------------

function say(event) {
  const bytes = frame(event);
  for (let at = 0; at < bytes.length; ) at += fs.writeSync(EVENTS_FD, bytes, at);
}

function patch(stream, type) {
  const decoder = new StringDecoder('utf8');
  stream.write = (chunk, encoding, done) => {
    const callback = typeof encoding === 'function' ? encoding : done;
    const text = typeof chunk === 'string' ? chunk : decoder.write(Buffer.from(chunk.buffer, chunk.byteOffset, chunk.byteLength));
    for (const piece of pieces(text)) say({ type, text: piece });
    if (typeof callback === 'function') process.nextTick(callback);
    return true;
  };
}

function display(value) {
  const data = show.isBundle(value) ? show.checked(value) : show.bundle(value);
  say({ type: 'result', main: false, data });
}

// -- a cell ---------------------------------------------------------------------------------------------------

function run({ code, count, cwd, env, warm }) {
  const cell = { count, restore: null };
  running = cell;
  const id = readBootId();
  if (id !== bootId || warm) {
    bootId = id;
    random.reseed(generation);
  }
  try {
    if (cwd) process.chdir(cwd);
    cell.restore = environment(env ?? {});
  } catch (error) {
    end(cell, 'error', { name: error.name, value: error.message, traceback: '' });
    return;
  }
  const expression = `${code}\n//# sourceURL=${warm ? 'warm' : `cell-${count}.js`}`;
  const options = { expression, replMode: true, objectGroup: 'cell' };
  keepNextPromise();
  session.post('Runtime.evaluate', options, (error, answer) => {
    if (error || !answer.result) settle(cell, 'interrupted');
    else if (answer.exceptionDetails) settle(cell, 'error', thrown(answer));
    else settle(cell, 'ok', valueOf(answer.result));
  });
}

// Node dies when the promise of a cell is collected before it has come to anything, which one that waits for
// nothing, or was interrupted while it waited, would be. It is the first one that an evaluation makes.
function keepNextPromise() {
  const stop = promiseHooks.onInit((promise) => {
    stop();
    kept = promise;
  });
}

let kept = null;
const abandoned = [];

// A cell has come to its end, unless it was interrupted and nobody waits any more.
function settle(cell, status, value) {
  if (running !== cell) return;
  if (status === 'ok' && value !== undefined) say({ type: 'result', main: true, data: show.bundle(value) });
  end(cell, status, status === 'error' ? show.failure(value) : undefined);
}

// The value behind what the inspector says of it.
function valueOf(remote) {
  if (remote.objectId === undefined) {
    if (remote.type === 'undefined') return undefined;
    if (remote.type === 'bigint') return BigInt(remote.unserializableValue.slice(0, -1));
    return remote.unserializableValue === undefined ? remote.value : Number(remote.unserializableValue);
  }
  let found;
  take = (value) => {
    found = value;
  };
  // As an argument and not as `this`, so that nothing is boxed.
  const arguments_ = [{ objectId: remote.objectId }];
  const functionDeclaration = `function (value) { globalThis[Symbol.for('llm4agents.take')](value) }`;
  const call = { functionDeclaration, objectId: remote.objectId, arguments: arguments_ };
  session.post('Runtime.callFunctionOn', call);
  return found;
}

let take = () => {};
Object.defineProperty(globalThis, Symbol.for('llm4agents.take'), { value: (value) => take(value) });

function thrown({ exceptionDetails }) {
  return exceptionDetails.exception === undefined ? new Error(exceptionDetails.text) : valueOf(exceptionDetails.exception);
}

function end(cell, status, error) {
  running = null;
  Atomics.store(answered, 0, cell.count);
  cell.restore?.();
  const why = CAUSES[Atomics.exchange(cause, 0, 0)];
  if (status === 'interrupted') {
    abandoned.push(kept);
    error = { name: 'Interrupted', value: 'the cell was interrupted', traceback: '' };
    if (why === 'timeout') {
      status = 'timed_out';
      error.name = 'TimeoutError';
      error.value = 'the cell ran longer than its timeout and was interrupted';
    }
  }
  if (error) say({ type: 'error', ...error });
  say({ type: 'end', status, execution_count: cell.count });
  session.post('Runtime.releaseObjectGroup', { objectGroup: 'cell' });
}

// The variables of a cell; what puts the former ones back.
function environment(env) {
  const before = Object.keys(env).map((name) => [name, process.env[name]]);
  Object.assign(process.env, env);
  return () => {
    for (const [name, value] of before) {
      if (value === undefined) delete process.env[name];
      else process.env[name] = value;
    }
  };
}

function readBootId() {
  try {
    return fs.readFileSync(BOOT_ID, 'latin1');
  } catch {
    return '';
  }
}

// -- what cells find ------------------------------------------------------------------------------------------

// By working directory: what `require` and `import` resolve from.
const resolvers = new Map();

function resolver() {
  const cwd = process.cwd();
  let found = resolvers.get(cwd);
  if (found === undefined) {
    const script = new vm.Script('(name, options) => import(name, options)', {
      filename: path.join(cwd, 'cell.mjs'),
      importModuleDynamically: vm.constants.USE_MAIN_CONTEXT_DEFAULT_LOADER,
    });
    found = { require: createRequire(path.join(cwd, 'cell.js')), import: script.runInThisContext() };
    resolvers.set(cwd, found);
  }
  return found;
}

function define(name, get) {
  const set = (value) => Object.defineProperty(globalThis, name, { value, writable: true, configurable: true });
  Object.defineProperty(globalThis, name, { get, set, configurable: true });
}

function globals() {
  define('require', () => resolver().require);
  define('__dirname', () => process.cwd());
  define('__filename', () => path.join(process.cwd(), 'cell.js'));
  globalThis.module = { exports: {} };
  globalThis.exports = globalThis.module.exports;
  globalThis.display = display;
  const importer = (name, options) => resolver().import(name, options);
  Object.defineProperty(globalThis, IMPORT, { value: importer });
  // As in node's own REPL: built-in modules are there without being asked for.
  for (const name of builtinModules) {
    if (!/^[a-z][a-z0-9_]*$/.test(name) || name in globalThis) continue;
    define(name, () => require(name));
  }
}

globals();
patch(process.stdout, 'stdout');
patch(process.stderr, 'stderr');
process.on('SIGINT', () => {}); // it is for what a cell has started; the cell itself is ended by watch.js
process.on('uncaughtException', (error) => process.stderr.write(`Uncaught ${show.failure(error).traceback}\n`));
process.on('unhandledRejection', (error) => process.stderr.write(`Uncaught (in promise) ${show.failure(error).traceback}\n`));
process.on('exit', () => session.disconnect()); // else its open calls are answered where nothing can run any more

const watcher = new Worker(path.join(__dirname, 'watch.js'), { workerData: { generation, cause, answered }, stdout: true, stderr: true });
watcher.on('message', (count) => {
  if (count === 0) return say({ type: 'ready' });
  Atomics.store(answered, 0, count);
  if (running !== null && running.count === count) end(running, 'interrupted');
});
const commands = new Reader(2 * REQUEST_BYTES_MAX, (body) => run(JSON.parse(body)));
new net.Socket({ fd: COMMANDS_FD, readable: true, writable: false }).on('data', (data) => commands.feed(data));
