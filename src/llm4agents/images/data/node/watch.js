'use strict';
// A thread beside the one that runs cells: ends what does not end, and reseeds while it is busy.

const inspector = require('node:inspector');
const net = require('node:net');
const { parentPort, workerData } = require('node:worker_threads');
const { Reader } = require('./wire');
const random = require('./random');

const FD = 5;
const session = new inspector.Session();
session.connectToMainThread();

function interrupt(count, cause) {
  Atomics.store(workerData.cause, 0, cause === 'timeout' ? 2 : 1);
  let told = false;
  const tell = () => {
    if (!told) parentPort.postMessage(count);
    told = true;
  };
  session.post('Runtime.terminateExecution', tell);
  // In a system call it cannot be ended; the message waits there for it.
  setTimeout(tell, 1000).unref();
}

const reader = new Reader(65536, (body) => {
  const { op, count, cause } = JSON.parse(body);
  if (op === 'reseed') random.reseed(workerData.generation);
  else if (op === 'interrupt') interrupt(count, cause);
});
new net.Socket({ fd: FD, readable: true, writable: false }).on('data', (data) => reader.feed(data));
