// Reads a trace with Perfetto's own parser, its trace processor, which the web interface runs as
// WebAssembly, and prints what it found as JSON: the slices by process and row, and what it could
// not import.
//
//   node read_trace.js FOLDER TRACE      FOLDER has engine_bundle.js and trace_processor*.wasm
"use strict";
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const [folder, trace] = process.argv.slice(2);

// --- Protocol buffers, as far as trace_processor.proto needs them ---

function varint(value) {
  const bytes = [];
  for (; value > 127; value = Math.floor(value / 128)) bytes.push((value % 128) + 128);
  return [...bytes, value];
}

function number(field, value) {
  return [...varint(field * 8), ...varint(value)];
}

function bytes(field, value) {
  return Buffer.concat([Buffer.from([...varint(field * 8 + 2), ...varint(value.length)]), Buffer.from(value)]);
}

function readVarint(from) {
  let value = 0n;
  for (let shift = 0n; ; shift += 7n) {
    const byte = from.data[from.at++];
    value |= BigInt(byte & 127) << shift;
    if (byte < 128) return value;
  }
}

function* fields(data) {
  const from = {data, at: 0};
  while (from.at < data.length) {
    const key = Number(readVarint(from));
    const field = key >> 3;
    if ((key & 7) === 0) {
      yield [field, readVarint(from)];
    } else if ((key & 7) === 2) {
      const length = Number(readVarint(from));
      yield [field, data.subarray(from.at, (from.at += length))];
    } else {
      from.at += (key & 7) === 1 ? 8 : 4;
    }
  }
}

// --- The processor, as a web page has it ---

const replies = [];
const port = {postMessage: (message) => replies.push(Buffer.from(message))};
const say = (...words) => console.error(...words);
const page = {
  URL, TextDecoder, TextEncoder, performance, setTimeout, clearTimeout, queueMicrotask,
  console: {log: say, warn: say, error: say, info: say, debug: say},
  WorkerGlobalScope: function() {},
  importScripts: function() {},
  location: {href: "http://localhost/engine_bundle.js"},
  XMLHttpRequest: class {
    open(method, url) {
      this.url = url;
    }
    send() {
      this.response = fs.readFileSync(path.join(folder, path.basename(this.url)));
    }
  },
};
process.on("uncaughtException", (error) => {
  console.error(error.message);
  process.exit(1);
});
page.self = page;
vm.createContext(page);
vm.runInContext(fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8"), page);
page.onmessage({data: port});

const kAppend = 1, kFinish = 2, kQuery = 3;
let sequence = 0;

function request(method, ...rest) {
  const message = Buffer.concat([Buffer.from([...number(1, sequence++), ...number(2, method)]), ...rest]);
  // The bridge asks for an array of its own realm.
  const data = vm.runInContext("(bytes) => Uint8Array.from(bytes)", page)(bytes(1, message));
  port.onmessage({data});
  return Buffer.concat(replies.splice(0));
}

function query(sql) {
  let columns = [];
  const cells = [];
  for (const [, message] of fields(request(kQuery, bytes(103, bytes(1, Buffer.from(sql)))))) {
    for (const [field, result] of fields(message)) {
      if (field === 5 || field === 6) throw new Error(result.toString());
      if (field !== 203) continue;
      for (const [part, value] of fields(result)) {
        if (part === 1) columns.push(value.toString());
        if (part === 2 && value.length > 0) throw new Error(value.toString());
        if (part !== 3) continue;
        let kinds = [], numbers = [], texts = [];
        for (const [cell, data] of fields(value)) {
          if (cell === 1) kinds = [...data];
          if (cell === 2) for (const from = {data, at: 0}; from.at < data.length;) numbers.push(Number(BigInt.asIntN(64, readVarint(from))));
          if (cell === 5) texts = data.toString().split("\0");
        }
        for (const kind of kinds) cells.push(kind === 2 ? numbers.shift() : kind === 4 ? texts.shift() : null);
      }
    }
  }
  const rows = [];
  while (cells.length > 0) rows.push(cells.splice(0, columns.length));
  return rows;
}

function main() {
  request(kAppend, bytes(101, fs.readFileSync(trace)));
  request(kFinish);
  const rows = query(`
    SELECT process.name, thread.name, count(*), sum(slice.dur), max(slice.depth)
    FROM slice JOIN thread_track ON slice.track_id = thread_track.id
    JOIN thread USING (utid) JOIN process USING (upid) GROUP BY 1, 2 ORDER BY 1, 2`);
  const bytesOf = query(`
    SELECT slice.category, count(*), sum(extract_arg(slice.arg_set_id, 'args.bytes'))
    FROM slice GROUP BY 1 ORDER BY 1`);
  const errors = query("SELECT name, value FROM stats WHERE severity = 'error' AND value > 0");
  console.log(JSON.stringify({rows, bytes: bytesOf, errors}));
}

// The module is compiled in the background.
(async () => {
  for (let tries = 0; ; ++tries) {
    await new Promise((resolve) => setTimeout(resolve, 100));
    try {
      return main();
    } catch (error) {
      if (tries === 600 || sequence > 1) throw error;
      sequence = 0;
    }
  }
})().catch((error) => {
  console.error(error.message);
  process.exit(1);
});
