'use strict';
// The service of a sandbox's JavaScript and TypeScript: listens, keeps a worker process for each context and one
// spare, translates cells, relays what workers say. It runs nothing of a cell, so it answers whatever they do.
//
//   node --expose-internals service.js --socket PATH [--ready FILE] [--warm FILE] [--cwd DIR] [--grace-s S]
//
// PATH takes every op, PATH.control too. --warm is a file of cells separated by lines that begin with `// %%`
// (`// %% typescript` for TypeScript); --ready is written, as {"problems": []}, when they have run.

const { spawn } = require('node:child_process');
const fs = require('node:fs');
const net = require('node:net');
const os = require('node:os');
const path = require('node:path');
const { StringDecoder } = require('node:string_decoder');
const { parseArgs } = require('node:util');
const { rewrite, strip } = require('./rewrite');
const wire = require('./wire');

const RESTORED = 'SIGUSR2';
const RAW = ['stdout', 'stderr'];
const NOISE = 'Waiting for the debugger to disconnect...\n'; // of process.exit(): watch.js is one

const { values: options } = parseArgs({
  options: {
    socket: { type: 'string' },
    ready: { type: 'string' },
    warm: { type: 'string' },
    cwd: { type: 'string', default: os.homedir() },
    'grace-s': { type: 'string', default: '5' },
  },
});
const graceMs = Number(options['grace-s']) * 1000;

const contexts = new Map();
const workers = new Set();
let spare = null;

// -- a worker's process ---------------------------------------------------------------------------------------

class WorkerProcess {
  constructor() {
    const stdio = ['ignore', 'pipe', 'pipe', 'pipe', 'pipe', 'pipe'];
    // A process group of its own: what a cell starts is interrupted and ended with it.
    const script = path.join(__dirname, 'worker.js');
    // Compiled functions are kept: they are what a warm-up is for. And no collecting while idle: a clone that wakes
    // up long after it was frozen would begin with that.
    const argv = ['--no-flush-bytecode', '--no-memory-reducer', '--disable-warning=ExperimentalWarning', script];
    this.child = spawn(process.execPath, argv, { cwd: options.cwd, stdio, detached: true });
    const [, out, err, commands, events, watch] = this.child.stdio;
    this.commands = commands;
    this.watch = watch;
    this.context = null;
    this.used = false; // by a cell that is not of the warm-up
    this.decoders = RAW.map(() => new StringDecoder('utf8'));
    this.raw = [out, err];
    this.events = events;
    this.reader = new wire.Reader(wire.EVENT_BYTES_MAX, (body) => this.heard(body));
    this.streams = [out, err, events];
    this.raw.forEach((stream, index) => stream.on('data', (data) => this.printed(index, data)));
    events.on('data', (data) => this.feed(data));
    const watched = new wire.Reader(65536, () => this.context?.clear());
    watch.on('data', (data) => {
      try {
        watched.feed(data);
      } catch {
        this.kill();
      }
    });
    for (const stream of this.child.stdio) stream?.on('error', () => {});
    this.child.once('error', (error) => this.gone(null, error.message));
    this.child.once('exit', (code, signal) => this.gone(code, signal));
    this.ended = false;
    this.waiting = [];
    this.ready = new Promise((resolve) => {
      this.isReady = resolve;
    });
    workers.add(this);
  }

  feed(data) {
    try {
      this.reader.feed(data);
    } catch {
      this.kill(); // a cell has written to our descriptor
    }
  }

  heard(body) {
    // The last event of a cell is small; only those need to be looked into.
    const event = body.length < 256 ? JSON.parse(body) : null;
    if (event?.type === 'ready') return this.isReady();
    if (event?.type === 'end') {
      this.drain();
      this.context?.finished(event);
    } else this.context?.said(body, event);
  }

  printed(index, data) {
    const text = this.decoders[index].write(data).replace(NOISE, '');
    for (const piece of wire.pieces(text)) this.context?.said(Buffer.from(JSON.stringify({ type: RAW[index], text: piece })), null);
  }

  // What the worker's children have printed so far is read before its cell is said to have ended.
  drain() {
    this.raw.forEach((stream, index) => read(stream, (data) => this.printed(index, data)));
  }

  send(command) {
    this.commands.write(wire.frame(command));
  }

  tell(command) {
    this.watch.write(wire.frame(command));
  }

  // And what its cells have started.
  kill() {
    try {
      process.kill(-this.child.pid, 'SIGKILL');
    } catch {
      // They have ended.
    }
  }

  flow(on) {
    for (const stream of this.streams) on ? stream.resume() : stream.pause();
  }

  gone(code, why) {
    if (this.ended) return;
    this.ended = true;
    workers.delete(this);
    if (spare === this) spare = null;
    read(this.events, (data) => this.feed(data));
    this.drain();
    this.kill(); // its children
    const { context } = this;
    this.context = null;
    context?.died(this, code === null ? `killed by ${why}` : `exited with code ${code}`);
    for (const done of this.waiting) done();
    for (const stream of this.child.stdio) stream?.destroy();
  }
}

// Everything that lies in a non-blocking stream, without waiting for the loop to say so.
function read(stream, take) {
  const fd = stream._handle?.fd;
  if (!(fd >= 0)) return;
  const buffer = Buffer.alloc(65536);
  try {
    for (let size; (size = fs.readSync(fd, buffer)) > 0; ) take(Buffer.from(buffer.subarray(0, size)));
  } catch {
    // EAGAIN: nothing more.
  }
}

function takeWorker() {
  const worker = spare ?? new WorkerProcess();
  spare = null;
  return worker;
}

function keepSpare() {
  if (spare === null) spare = new WorkerProcess();
}

// -- a context ------------------------------------------------------------------------------------------------

class Context {
  constructor(name) {
    this.name = name;
    this.count = 0;
    this.worker = null;
    this.cell = null; // {request, peer, cause, timers}
    this.queue = [];
    this.held = [];
    this.heldChars = 0;
    this.settling = false; // the worker is not ready for the next cell yet
  }

  run(request, peer) {
    this.queue.push({ request, peer, cause: null, timers: [] });
    this.next();
  }

  next() {
    if (this.cell !== null || this.settling || this.queue.length === 0) return;
    const cell = this.queue.shift();
    if (cell.peer.gone) return this.next();
    this.cell = cell;
    if (!cell.request.warm) this.count += 1;
    cell.peer.onGone = () => this.interrupt('interrupt');
    for (const body of this.held.splice(0)) cell.peer.write(body);
    this.heldChars = 0;
    const { code, language, cwd, env, warm, timeout_s: timeout } = cell.request;
    let text = String(code ?? '');
    try {
      if (language === 'typescript') text = strip(text);
      text = rewrite(text);
    } catch (error) {
      cell.peer.send({ type: 'error', name: error.name, value: error.message, traceback: `${error.name}: ${error.message}` });
      this.finished({ type: 'end', status: 'error', execution_count: this.count });
      return;
    }
    if (this.worker === null) {
      this.worker = takeWorker();
      this.worker.context = this;
    }
    if (timeout > 0) this.later(cell, timeout * 1000, () => this.interrupt('timeout'));
    this.worker.used ||= !warm;
    this.worker.send({ code: text, count: this.count, cwd, env, warm });
  }

  later(cell, ms, act) {
    cell.timers.push(setTimeout(act, Math.min(ms, 0x7fffffff)));
  }

  said(body, event) {
    if (this.cell !== null) {
      if (!this.cell.peer.write(body)) this.hold(this.cell.peer);
    } else if (this.heldChars < wire.HELD_CHARS_MAX && (event ?? JSON.parse(body)).type.startsWith('std')) {
      this.held.push(body);
      this.heldChars += body.length;
    }
  }

  // Nobody reads: neither do we, and the cell waits.
  hold(peer) {
    const { worker } = this;
    worker?.flow(false);
    peer.socket.once('drain', () => worker?.flow(true));
    peer.socket.once('close', () => worker?.flow(true));
  }

  finished(event) {
    const { cell } = this;
    if (cell === null) return;
    this.cell = null;
    for (const timer of cell.timers) clearTimeout(timer);
    cell.peer.onGone = null;
    cell.peer.send(event);
    cell.peer.end();
    if (!cell.request.warm) setImmediate(keepSpare);
    this.next();
  }

  died(worker, how) {
    if (this.worker !== worker) return;
    this.worker = null;
    this.settling = false;
    if (this.cell === null) return this.next();
    const status = this.cell.cause === 'timeout' ? 'timed_out' : 'died';
    this.cell.peer.send({ type: 'error', name: 'InterpreterDied', value: `the interpreter ${how}`, traceback: '' });
    this.finished({ type: 'end', status, execution_count: this.count });
  }

  interrupt(cause) {
    const { cell, worker } = this;
    if (cell === null || worker === null) return;
    if (cause === 'timeout') this.later(cell, graceMs, () => worker.kill());
    if (cell.cause !== null) return;
    cell.cause = cause;
    this.settling = true;
    worker.tell({ op: 'interrupt', count: this.count, cause: cell.cause });
  }

  clear() {
    this.settling = false;
    this.next();
  }

  // Ends the worker; calls `done` when it is gone.
  end(done) {
    if (this.worker === null) return done();
    this.worker.waiting.push(done);
    this.worker.kill();
  }
}

// -- who asks -------------------------------------------------------------------------------------------------

class Peer {
  constructor(socket) {
    this.socket = socket;
    this.gone = false;
    this.onGone = null;
    // Its half-close too: the host never half-closes a connection it still reads.
    const gone = () => {
      this.gone = true;
      this.onGone?.();
      this.onGone = null;
    };
    socket.on('end', gone);
    socket.on('close', gone);
    socket.on('error', gone);
    const reader = new wire.Reader(wire.REQUEST_BYTES_MAX, (body) => dispatch(this, body));
    socket.on('data', (data) => {
      try {
        reader.feed(data);
      } catch {
        socket.destroy();
      }
    });
  }

  write(body) {
    const head = Buffer.allocUnsafe(4);
    head.writeUInt32LE(body.length);
    if (this.gone) return true;
    this.socket.cork();
    this.socket.write(head);
    const room = this.socket.write(body);
    this.socket.uncork();
    return room;
  }

  send(event) {
    return this.write(Buffer.from(JSON.stringify(event)));
  }

  answer(...events) {
    for (const event of events) this.send(event);
    this.end();
  }

  end() {
    this.socket.end();
  }
}

const done = (count = 0) => ({ type: 'end', status: 'ok', execution_count: count });
const refused = (name, value) => [
  { type: 'error', name, value, traceback: '' },
  { type: 'end', status: 'error', execution_count: 0 },
];

function dispatch(peer, body) {
  let request = null;
  try {
    request = JSON.parse(body);
  } catch {
    // Refused below.
  }
  const { op, context: name = 'default' } = request ?? {};
  const context = contexts.get(name);
  const known = typeof name === 'string' && ['run', 'interrupt', 'restart', 'remove', 'list', 'ping'].includes(op);
  if (!known) peer.answer(...refused('BadRequest', 'not a request'));
  else if (op === 'run') {
    if (context === undefined && contexts.size >= wire.CONTEXTS_MAX) {
      peer.answer(...refused('TooManyContexts', `${wire.CONTEXTS_MAX} contexts are open, and that is the most`));
    } else (context ?? open(name)).run(request, peer);
  } else if (op === 'list') {
    const list = [...contexts.values()].map(({ name: id, count, cell }) => ({ id, count, busy: cell !== null }));
    peer.answer({ type: 'contexts', contexts: list }, done());
  } else if (context === undefined || op === 'ping') peer.answer(done());
  else if (op === 'interrupt') {
    context.interrupt('interrupt');
    peer.answer(done(context.count));
  } else {
    if (op === 'remove') contexts.delete(name);
    context.count = op === 'restart' ? 0 : context.count;
    context.end(() => peer.answer(done(context.count)));
  }
}

function open(name) {
  const context = new Context(name);
  contexts.set(name, context);
  return context;
}

// -- the service ----------------------------------------------------------------------------------------------

function listen(where) {
  fs.rmSync(where, { force: true });
  return new Promise((resolve) => {
    const server = net.createServer({ allowHalfOpen: true }, (socket) => new Peer(socket));
    server.listen(where, () => resolve(server));
  });
}

// Runs the cells of a file once, in the workers that first cells will find; what is wrong with them.
async function warm(file) {
  const problems = [];
  const cells = fs.readFileSync(file, 'utf8').split(/^\/\/ %%(.*)$/m).slice(1);
  for (let at = 0; at < cells.length; at += 2) {
    const language = cells[at].trim() || 'javascript';
    const events = await ask({ op: 'run', context: `${language}:default`, language, code: cells[at + 1], warm: true });
    const error = events.find(({ type }) => type === 'error');
    if (error) problems.push(`warm-up cell: ${error.name}: ${error.value}`);
  }
  return problems;
}

function ask(request) {
  return new Promise((resolve) => {
    const events = [];
    const socket = net.connect(options.socket, () => socket.write(wire.frame(request)));
    const reader = new wire.Reader(wire.EVENT_BYTES_MAX, (body) => events.push(JSON.parse(body)));
    socket.on('data', (data) => reader.feed(data));
    socket.on('close', () => resolve(events));
  });
}

async function main() {
  process.on(RESTORED, () => {
    // The machine is a copy now. An idle worker sees that itself before its next cell, and what has run nothing of
    // a user's draws nothing: in software emulation this is on the way to a clone's first answer.
    for (const worker of workers) if (worker.used) worker.tell({ op: 'reseed' });
  });
  process.on('SIGINT', () => {});
  process.on('SIGTERM', () => {
    for (const worker of workers) worker.kill();
    for (const where of [options.socket, `${options.socket}.control`]) fs.rmSync(where, { force: true });
    process.exit(0);
  });
  process.chdir(options.cwd);
  await listen(options.socket);
  await listen(`${options.socket}.control`);
  const problems = options.warm ? await warm(options.warm) : [];
  keepSpare();
  // Nothing may be under way in a machine that is frozen now: it would go on in every clone.
  await Promise.all([...workers].map((worker) => worker.ready));
  await ask({ op: 'ping' });
  if (options.ready) {
    fs.writeFileSync(`${options.ready}.tmp`, JSON.stringify({ problems }));
    fs.renameSync(`${options.ready}.tmp`, options.ready);
  }
}

main();
