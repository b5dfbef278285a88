'use strict';
// Frames and bounds, for every process of the runner. A frame to the host is u32 little-endian length + JSON
// (docs/design/interfaces.md, "The interpreter in the guest"); between our own processes the same.

const LENGTH_BYTES = 4;
const REQUEST_BYTES_MAX = 16 << 20;
const EVENT_BYTES_MAX = 32 << 20;
const TEXT_CHARS_MAX = 8192; // of one stdout or stderr event: at most 32 KiB
const HELD_CHARS_MAX = 65536; // of what was printed between cells
const CONTEXTS_MAX = 20; // the host allows fewer

const IMPORT = '__llm4agents_import__'; // what rewritten cells call, and worker.js defines

function frame(value) {
  const body = Buffer.from(JSON.stringify(value));
  const whole = Buffer.allocUnsafe(LENGTH_BYTES + body.length);
  whole.writeUInt32LE(body.length);
  body.copy(whole, LENGTH_BYTES);
  return whole;
}

// Cuts a byte stream into frames' bodies; calls `take(body)` for each. Throws on one longer than `max`.
class Reader {
  constructor(max, take) {
    this.max = max;
    this.take = take;
    this.parts = [];
    this.have = 0;
    this.want = LENGTH_BYTES;
    this.inBody = false;
  }

  feed(data) {
    this.parts.push(data);
    this.have += data.length;
    while (this.have >= this.want) {
      const all = this.parts.length === 1 ? this.parts[0] : Buffer.concat(this.parts);
      const piece = all.subarray(0, this.want);
      const rest = all.subarray(this.want);
      this.parts = rest.length ? [rest] : [];
      this.have = rest.length;
      if (this.inBody) {
        this.inBody = false;
        this.want = LENGTH_BYTES;
        this.take(piece);
      } else {
        this.want = piece.readUInt32LE();
        this.inBody = true;
        if (this.want > this.max) throw new RangeError(`a frame of ${this.want} bytes`);
      }
    }
  }
}

// Text in pieces that neither a frame nor a surrogate pair suffers from.
function* pieces(text) {
  let at = 0;
  while (at < text.length) {
    let end = Math.min(text.length, at + TEXT_CHARS_MAX);
    const last = text.charCodeAt(end - 1);
    if (end < text.length && last >= 0xd800 && last < 0xdc00) end -= 1;
    yield text.slice(at, end);
    at = end;
  }
}

module.exports = { frame, Reader, pieces, REQUEST_BYTES_MAX, EVENT_BYTES_MAX, HELD_CHARS_MAX, CONTEXTS_MAX, IMPORT };
