'use strict';
// A thread beside the one that runs cells: ends what does not end, and reseeds while it is busy.

const inspector = require('node:inspector');
const net = require('node:net');
const { setTimeout: sleep } = require('node:timers/promises');
const { parentPort, workerData } = require('node:worker_threads');
const { frame, Reader } = require('./wire');
const random = require('./random');

const FD = 5;
const ANSWER_MS = 50;
const AGAIN_MS_MAX = 2000;
const session = new inspector.Session();
session.connectToMainThread();

// What the main thread says to an inspector's command, or null if it says nothing for a while.
function ask(method, parameters) {
  const answer = new Promise((resolve) => {
    session.post(method, parameters, (error, result) => resolve(error ? {} : result));
  });
  return Promise.race([answer, sleep(4 * ANSWER_MS, null)]);
}

// End a cell, however it takes, and say so when the thread is ready for the next one.
//
// First the thread is asked: one that only waits can end its cell itself, and must not be ended. One that does not
// answer is in a loop or a system call. The end of an execution can come too late for it and hit another, which may
// be one of ours: so all is said again, and in the end something is evaluated until that is not hit any more.
async function interrupt(count, cause) {
  const over = () => Atomics.load(workerData.answered, 0) === count;
  Atomics.store(workerData.answered, 0, 0);
  Atomics.store(workerData.cause, 0, cause === 'timeout' ? 2 : 1);
  parentPort.postMessage(count);
  let pause = ANSWER_MS;
  await sleep(pause);
  while (!over()) {
    await ask('Runtime.terminateExecution');
    // After that, so that what it ends in system calls ends here, too: what the cell has started.
    process.kill(-process.pid, 'SIGINT');
    parentPort.postMessage(count);
    await sleep(pause);
    pause = Math.min(2 * pause, AGAIN_MS_MAX);
  }
  process.kill(-process.pid, 'SIGINT');
  for (let clear = 0; clear < 2; ) {
    const answer = await ask('Runtime.evaluate', { expression: '0' });
    clear = answer?.result?.value === 0 ? clear + 1 : 0;
  }
  service.write(frame({ clear: count }));
}

const reader = new Reader(65536, (body) => {
  const { op, count, cause } = JSON.parse(body);
  if (op === 'reseed') random.reseed(workerData.generation);
  else if (op === 'interrupt') interrupt(count, cause);
});
const service = new net.Socket({ fd: FD, readable: true, writable: true });
service.on('data', (data) => reader.feed(data));
parentPort.postMessage(0); // up
