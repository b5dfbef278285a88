'use strict';
// Random numbers that no two clones share. A frozen worker has state that the kernel's new entropy does not
// reach: OpenSSL's generators, what node:crypto keeps drawn ahead, V8's Math.random.
//
// OpenSSL is reseeded by reseed.node (RAND_poll; the generators of all threads notice). Math.random draws from
// OpenSSL here. What node keeps is drawn empty when the generation has changed. V8's generators of realms and
// threads made later are seeded by a flag; those that a cell made before are not reached, nor are hash seeds.

const crypto = require('node:crypto');
const path = require('node:path');
const v8 = require('node:v8');
const { syncBuiltinESMExports } = require('node:module');

const RESEED = path.join(__dirname, 'reseed.node');
const UUIDS_KEPT = 128; // by node's crypto.randomUUID
const INTS_KEPT = 1024; // by node's crypto.randomInt
const POOL = 128;

// In any thread. Without reseed.node (on a developer's machine) there are no clones.
function reseed(generation) {
  try {
    process.dlopen({ exports: {} }, RESEED);
  } catch (error) {
    if (error.code !== 'ERR_DLOPEN_FAILED' || require('node:fs').existsSync(RESEED)) throw error;
  }
  Atomics.add(generation, 0, 1);
  // Of realms and threads that are made from now on.
  v8.setFlagsFromString(`--random-seed=${1 + (crypto.randomBytes(4).readUInt32LE() >>> 2)}`);
}

// In the thread that runs cells.
function install(generation) {
  const { randomUUID, randomInt, randomFillSync } = crypto;
  const words = new Uint32Array(2 * POOL);
  let at = POOL;
  let seen = Atomics.load(generation, 0);

  function fresh() {
    const now = Atomics.load(generation, 0);
    if (now === seen) return;
    seen = now;
    at = POOL;
    for (let i = 0; i < UUIDS_KEPT; i += 1) randomUUID();
    for (let i = 0; i < INTS_KEPT; i += 1) randomInt(2);
  }

  const patched = {
    random() {
      fresh();
      if (at === POOL) {
        randomFillSync(words);
        at = 0;
      }
      const high = words[2 * at] >>> 5;
      const low = words[2 * at + 1] >>> 6;
      at += 1;
      return (high * 67108864 + low) / 9007199254740992;
    },
    randomUUID(...options) {
      fresh();
      return randomUUID(...options);
    },
    randomInt(...bounds) {
      fresh();
      return randomInt(...bounds);
    },
  };
  const set = (object, name) =>
    Object.defineProperty(object, name, { ...Object.getOwnPropertyDescriptor(object, name), value: patched[name] });
  set(Math, 'random');
  set(crypto, 'randomUUID');
  set(crypto, 'randomInt');
  set(Object.getPrototypeOf(crypto.webcrypto), 'randomUUID');
  syncBuiltinESMExports();
}

module.exports = { reseed, install };
