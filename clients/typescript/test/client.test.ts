/** Against a real server with real microVMs: LLM4AGENTS_URL and LLM4AGENTS_API_KEY say which. */

import assert from "node:assert/strict";
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

test("a server in the sandbox is reached through its port, whatever it answers", async () => {
  await box.exec("mkdir -p www && echo page > www/index.html; python3 -m http.server 8000 -d www >/dev/null 2>&1 & for i in $(seq 100); do curl -s localhost:8000 >/dev/null && break; sleep 0.1; done");
  const page = await box.fetch(8000, "/index.html");
  assert.deepEqual([page.status, await page.text()], [200, "page\n"]);
  const none = await box.fetch(8000, "/none?x=1");
  assert.equal(none.status, 404);
  await none.arrayBuffer();
});

test("it is paused, comes back by itself, and is forked", async () => {
  await box.runCode("kept = 'over a pause'");
  await box.pause();
  assert.equal(box.info.state, "paused");
  assert.equal((await box.runCode("kept")).text, "'over a pause'");
  const [child] = await box.fork(1);
  assert.equal((await child!.runCode("kept")).text, "'over a pause'");
  await child!.kill();
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
