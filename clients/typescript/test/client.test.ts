/** Against a real server with real microVMs: LLM4AGENTS_URL and LLM4AGENTS_API_KEY say which. */

import assert from "node:assert/strict";
import { type IncomingMessage, get } from "node:http";
import { after, before, test } from "node:test";
import {
  AuthenticationError, Client, ConflictError, InvalidRequestError, NotFoundError, Sandbox, ServerUnavailableError, TimedOutError,
} from "llm4agents";

let box: Sandbox;

before(async () => {
  box = await Sandbox.create({ template: "python", memoryMib: 1024, timeout: 600, metadata: { of: "typescript" }, env: { WHO: "me" } });
});

after(async () => {
  await box?.kill();
});

test("a command's output comes as it is said, and how it ended", async () => {
  const heard: string[] = [];
  const done = await box.exec("echo one; echo é$WHO >&2; exit 3", { onStdout: (text) => heard.push(text) });
  assert.deepEqual([done.exit_code, done.ok, done.stdout, done.stderr], [3, false, "one\n", "éme\n"]);
  assert.equal(heard.join(""), "one\n");
  const words = await box.exec(["cat"], { stdin: "through" });
  assert.equal(words.stdout, "through");
});

test("output arrives before the command has ended", async () => {
  let first!: () => void;
  const begun = new Promise<void>((resolve) => (first = resolve));
  const running = box.exec("echo begun; while [ ! -e /tmp/go ]; do sleep 0.1; done; echo ended", { onStdout: () => first() });
  await begun;
  await box.files.write("/tmp/go", "");
  assert.equal((await running).stdout, "begun\nended\n");
});

test("a timeout ends the command and says so", async () => {
  const done = await box.exec("sleep 60", { timeout: 1 }).catch((error: unknown) => error);
  if (done instanceof Error) assert.ok(done instanceof TimedOutError);
  else assert.equal((done as { timed_out: boolean }).timed_out, true);
});

test("an aborted call is over at once", async () => {
  const end = new AbortController();
  const running = box.exec("echo there; sleep 60", { onDisconnect: "kill", signal: end.signal, onStdout: () => end.abort() });
  await assert.rejects(running, { name: "AbortError" });
});

test("code keeps its state, streams, and its errors are results", async () => {
  await box.runCode("x = 41");
  const types: string[] = [];
  for await (const event of box.streamCode("print('said')\nx + 1")) types.push(event.type);
  assert.deepEqual([types[0], types.at(-1)], ["stdout", "end"]);
  const found = await box.runCode("x + 1");
  assert.deepEqual([found.status, found.text], ["ok", "42"]);
  const bad = await box.runCode("1/0");
  assert.deepEqual([bad.status, bad.error?.name], ["error", "ZeroDivisionError"]);
});

test("a cell's output arrives before the cell has ended", async () => {
  const code = "import os, time\nprint('begun', flush=True)\nwhile not os.path.exists('/tmp/on'): time.sleep(0.1)\nprint('ended')";
  let said = "";
  for await (const event of box.streamCode(code, { timeout: 60 })) {
    if (event.type === "stdout") said += (event as { text: string }).text;
    if (event.type === "stdout" && said === "begun\n") await box.files.write("/tmp/on", "");
    if (event.type === "end") assert.equal((event as { status: string }).status, "ok");
  }
  assert.equal(said, "begun\nended\n");
});

test("files go in and out whole", async () => {
  const bytes = new Uint8Array(300_000).map((_, at) => at % 251);
  await box.files.write("deep/er/data.bin", bytes);
  assert.deepEqual(await box.files.read("~/deep/er/data.bin"), bytes);
  async function* pieces() {
    for (let at = 0; at < 4; at++) yield new TextEncoder().encode(`piece ${at}\n`);
  }
  await box.files.write("streamed.txt", pieces());
  assert.equal(await box.files.readText("streamed.txt"), "piece 0\npiece 1\npiece 2\npiece 3\n");
  let size = 0;
  for await (const piece of await box.files.stream("deep/er/data.bin")) size += piece.length;
  assert.equal(size, bytes.length);
  await box.files.move("streamed.txt", "moved.txt");
  assert.deepEqual([await box.files.exists("streamed.txt"), await box.files.exists("moved.txt")], [false, true]);
  const names = (await box.files.list()).map((entry) => entry.name);
  assert.ok(names.includes("deep") && names.includes("moved.txt"));
  await box.files.remove("deep", { recursive: true });
  await assert.rejects(box.files.read("deep/er/data.bin"), (error: unknown) => error instanceof NotFoundError && error.outcome === "not_started");
});

const ECHO = `
from http.server import BaseHTTPRequestHandler, HTTPServer
class Echo(BaseHTTPRequestHandler):
    def do_GET(self):
        body = self.path.encode()
        self.send_response(404 if self.path.startswith("/none") else 200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
server = HTTPServer(("127.0.0.1", 8000), Echo)
import os
if os.fork() == 0:
    server.serve_forever()
`;

/** As a browser does it, which finds every name of localhost here. */
async function browse(url: string, cookie?: string): Promise<IncomingMessage & { text: string }> {
  const { host, port, pathname, search } = new URL(url);
  const headers = { host, ...(cookie ? { cookie } : {}) };
  const answer = await new Promise<IncomingMessage>((resolve, reject) => {
    get({ host: "127.0.0.1", port, path: pathname + search, headers }, resolve).on("error", reject);
  });
  let text = "";
  for await (const piece of answer) text += piece;
  return Object.assign(answer, { text });
}

test("a server in the sandbox is reached through its port, whatever it answers", async () => {
  await box.files.write("echo.py", ECHO);
  assert.equal((await box.exec("python3 echo.py >/dev/null 2>&1")).exit_code, 0);
  // A query arrives as it was said: names twice, marks in values, nothing put into another spelling.
  for (const path of ["/", "/index.html", "/x?a=1&a=2&b=c?d&e", "/x?q=a+b%20c%2B&=&"]) {
    const page = await box.fetch(8000, path);
    assert.deepEqual([page.status, await page.text()], [200, path]);
  }
  const none = await box.fetch(8000, "/none?x=1");
  assert.deepEqual([none.status, await none.text()], [404, "/none?x=1"]);
  // What would be a call of the API itself is not made.
  for (const path of ["/../..", "/x/../../../pause", "/%2e%2E/9000/", "/..\\..\\pause"]) await assert.rejects(box.fetch(8000, path), InvalidRequestError);
});

test("a port's address opens for whoever has it, and for nobody else", async () => {
  const url = await box.url(8000, { path: "/page?x=1", expires: 120 });
  const first = await browse(url);
  const cookie = first.headers["set-cookie"]?.[0]?.split(";")[0];
  const page = cookie ? await browse(new URL(first.headers.location ?? "", url).href, cookie) : first;
  assert.deepEqual([page.statusCode, page.text], [200, "/page?x=1"]);
  const bare = new URL(url);
  bare.search = "";
  assert.equal((await browse(bare.href)).statusCode, 403);
});

test("it is paused, comes back by itself, and is forked", async () => {
  await box.runCode("kept = 'over a pause'");
  await box.pause();
  assert.equal(box.info.state, "paused");
  assert.equal((await box.runCode("kept")).text, "'over a pause'");
  const [child] = await box.fork(1);
  assert.equal((await child!.runCode("kept")).text, "'over a pause'");
  await child!.kill();
  await box.pause();
  await box.resume();
  assert.deepEqual([box.info.state, (await box.refresh()).state], ["running", "running"]);
  await box.setTimeout(900);
  assert.equal(box.info.idle_timeout_s, 900);
  await box.setTimeout(600);
  assert.equal((await box.refresh()).idle_timeout_s, 600);
});

test("a volume, a network and a template of one's own", async () => {
  const client = new Client();
  const name = `typescript-${process.pid}`;
  const volume = await client.request("post", "/v1/volumes", { body: { name, size_mib: 16 } });
  const small = { template: "base", memoryMib: 256, timeout: 600 };
  try {
    const rule = "allow tcp 192.0.2.1:80";
    const one = await Sandbox.create({ ...small, volumes: { "/data": name }, network: [rule] });
    try {
      assert.equal((await one.exec("echo kept > /data/it && mountpoint -q /data")).exit_code, 0);
      const rules = async () => (await client.request("get", "/v1/sandboxes/{sandbox}/network", { path: { sandbox: one.id } })).network.rules;
      assert.deepEqual(await rules(), [rule]);
      await one.setNetwork(["allow example.com"]);
      assert.deepEqual(await rules(), ["allow example.com"]);
    } finally {
      await one.kill();
    }
    const reader = await Sandbox.create({ ...small, volumes: { "/data": { volume: name, mode: "ro" } } });
    try {
      const read = await reader.exec("cat /data/it; touch /data/it");
      assert.deepEqual([read.stdout, read.ok], ["kept\n", false]);
    } finally {
      await reader.kill();
    }
    const maker = await Sandbox.create(small);
    try {
      await maker.exec("echo as it was > made; sync");
      assert.equal((await maker.snapshot(name, { description: "of a test" })).name, name);
    } finally {
      await maker.kill();
    }
    const clone = await Sandbox.create({ template: name });
    try {
      assert.equal((await clone.exec("cat made")).stdout, "as it was\n");
    } finally {
      await clone.kill();
    }
  } finally {
    await client.request("delete", "/v1/volumes/{volume}", { path: { volume: volume.id } });
    await client.request("delete", "/v1/templates/{name}", { path: { name } }).catch(() => undefined);
  }
});

test("what is there is listed, found again by its id, and typed calls reach every route", async () => {
  const ids: string[] = [];
  for await (const info of Sandbox.list({ metadata: { of: "typescript" }, state: ["running"] })) ids.push(info.id);
  assert.ok(ids.includes(box.id));
  const again = await Sandbox.connect(box.id);
  assert.equal((await again.exec("hostname")).ok, true);
  const client = new Client();
  const me = await client.request("get", "/v1/whoami");
  assert.equal(typeof me.project, "string");
  const processes = await client.request("get", "/v1/sandboxes/{sandbox}/processes", { path: { sandbox: box.id } });
  assert.ok(Array.isArray(processes.data));
  const volume = await client.request("post", "/v1/volumes", { body: { name: "from-typescript", size_mib: 16 } });
  await client.request("delete", "/v1/volumes/{volume}", { path: { volume: volume.id } });
});

test("errors say what to do, and whether anything ran", async () => {
  await assert.rejects(Sandbox.connect("sbx_00000000000000000000"), NotFoundError);
  await assert.rejects(Sandbox.create({ template: "no-such" }), (error: unknown) => error instanceof NotFoundError && error.code === "template_not_found");
  await assert.rejects(Sandbox.create({ more: { nonsense: 1 } as never }), InvalidRequestError);
  await assert.rejects(Sandbox.create({ memory_mib: 256 } as never), /create has no option memory_mib/);
  await assert.rejects(Sandbox.create({ apiKey: "l4a_wrong" }), AuthenticationError);
  await assert.rejects(Sandbox.create({ apiKey: "l4a_ключ" }), InvalidRequestError);
  await assert.rejects(Sandbox.connect(box.id, { url: "http://127.0.0.1:9" }), ServerUnavailableError);
  const plain = process.env["LLM4AGENTS_URL"]!.replace("http:", "https:");
  await assert.rejects(Sandbox.create({ url: plain }), (error: unknown) => error instanceof ServerUnavailableError && error.outcome === "not_started" && /no TLS/.test(error.hint ?? ""));
  await using short = await Sandbox.create({ template: "base", memoryMib: 256 });
  await short.kill();
  const gone = await short.exec("true").catch((error: unknown) => error);
  assert.ok(gone instanceof Error && !(gone instanceof ConflictError));
});
