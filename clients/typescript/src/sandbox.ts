/** A sandbox: a microVM of one's own on the server. */

import { type CodeEvent, type CodeOptions, type CodeResult, type ExecOptions, type ExecResult, exec, runCode, streamCode } from "./commands.js";
import { InvalidRequestError, NotFoundError } from "./errors.js";
import { Files } from "./files.js";
import type { components } from "./openapi.js";
import { type CallOptions, type ClientOptions, Transport, segment } from "./transport.js";

type Schemas = components["schemas"];
export type SandboxInfo = Schemas["Sandbox"];
type Wish = Partial<Schemas["SandboxCreate"]>;

export interface CreateOptions extends ClientOptions, CallOptions {
  /** Default `python`. */
  template?: string;
  /** Seconds without a call after which it ends, or pauses (`onTimeout`). Default 300. */
  timeout?: number;
  onTimeout?: "kill" | "pause";
  /** What of the network it may reach: a profile (`none`, `packages`, `public`), rule lines, or an object. */
  network?: Wish["network"];
  env?: Record<string, string>;
  metadata?: Record<string, string>;
  vcpus?: number;
  memoryMib?: number;
  /** By path in the sandbox: a volume's name or id, or with its mode. */
  volumes?: Record<string, string | { volume: string; mode: "rw" | "ro" }>;
  /** Seconds to wait for room on a node that is full. */
  wait?: number;
  /** Anything else of `POST /v1/sandboxes`. */
  more?: Wish;
}

// A wish that is misspelt is refused, as the server does it: in JavaScript no type says so.
const CREATE_OPTIONS: Record<keyof CreateOptions, true> = {
  url: true, apiKey: true, fetch: true, signal: true, template: true, timeout: true, onTimeout: true, network: true, env: true,
  metadata: true, vcpus: true, memoryMib: true, volumes: true, wait: true, more: true,
};

export interface ListOptions extends ClientOptions, CallOptions {
  state?: SandboxInfo["state"][];
  metadata?: Record<string, string>;
}

export class Sandbox implements AsyncDisposable {
  readonly files: Files;
  /** As the server described it last. */
  info: SandboxInfo;
  readonly #transport: Transport;

  private constructor(transport: Transport, info: SandboxInfo) {
    this.#transport = transport;
    this.info = info;
    this.files = new Files(transport, info.id);
  }

  /** A running sandbox. It is created once, however often a connection breaks under the call. */
  static async create(options: CreateOptions = {}): Promise<Sandbox> {
    const unknown = Object.keys(options).find((name) => !(name in CREATE_OPTIONS));
    if (unknown) throw new InvalidRequestError(`create has no option ${unknown}`, "invalid_request", "not_started", 0, "what has no name of its own here goes into `more`");
    const transport = new Transport(options);
    const volumes = Object.entries(options.volumes ?? {}).map(([path, value]) =>
      typeof value === "string" ? { path, volume: value } : { path, ...value });
    const json = {
      template: options.template, timeout_s: options.timeout, on_timeout: options.onTimeout, network: options.network,
      env: options.env, metadata: options.metadata, vcpus: options.vcpus, memory_mib: options.memoryMib, wait_s: options.wait,
      ...(volumes.length ? { volumes } : {}), ...options.more,
    };
    const info = await transport.json<SandboxInfo>("POST", "/v1/sandboxes", { json, once: true, signal: options.signal });
    return new Sandbox(transport, info);
  }

  /** A handle of one that exists, running or paused. Throws NotFoundError. */
  static async connect(id: string, options: ClientOptions & CallOptions = {}): Promise<Sandbox> {
    const transport = new Transport(options);
    return new Sandbox(transport, await transport.json("GET", `/v1/sandboxes/${segment(id)}`, { signal: options.signal }));
  }

  /** Every sandbox of the project, newest first, page by page. */
  static async *list(options: ListOptions = {}): AsyncGenerator<SandboxInfo> {
    const transport = new Transport(options);
    const metadata = Object.fromEntries(Object.entries(options.metadata ?? {}).map(([name, value]) => [`metadata.${name}`, value]));
    let after: string | null | undefined;
    do {
      const query = { ...metadata, state: options.state?.join(","), after };
      const page = await transport.json<Schemas["SandboxPage"]>("GET", "/v1/sandboxes", { query, signal: options.signal });
      yield* page.data;
      after = page.next;
    } while (after);
  }

  get id(): string {
    return this.info.id;
  }

  /** Run a command to its end: a string through the guest's shell, a list of words without. */
  exec(command: string | string[], options: ExecOptions = {}): Promise<ExecResult> {
    return exec(this.#transport, this.id, command, options);
  }

  /** Run a cell; variables stay for the next. */
  runCode(code: string, options: CodeOptions = {}): Promise<CodeResult> {
    return runCode(this.#transport, this.id, code, options);
  }

  /** A cell's events as they come; the last is `end`. */
  streamCode(code: string, options: CodeOptions = {}): AsyncGenerator<CodeEvent> {
    return streamCode(this.#transport, this.id, code, options);
  }

  /** The address of a port, signed so that whoever has it gets in until it expires (seconds). Needs a server with a domain. */
  async url(port: number, options: CallOptions & { path?: string; expires?: number } = {}): Promise<string> {
    const json = { port, path: options.path, expires_s: options.expires };
    const found = await this.#call<Schemas["PortUrl"]>("POST", "/traffic/urls", { json, signal: options.signal });
    return found.url;
  }

  /** A request to a server in the sandbox, through its platform's server; `path` begins with `/`, and its query goes as it is. Any status is an answer. */
  async fetch(port: number, path: string, init: { method?: string; headers?: Record<string, string>; body?: BodyInit; signal?: AbortSignal } = {}): Promise<Response> {
    const server = `${this.#path}/ports/${port}/`;
    const target = server + path.replace(/^\//, "");
    // `fetch` resolves dots: such a path (a guest may have said it) would be a call of the API with the caller's key.
    if (!new URL(this.#transport.url + target).pathname.startsWith(new URL(this.#transport.url + server).pathname)) {
      throw new InvalidRequestError(`${path} leads out of the sandbox's server`, "invalid_request", "not_started", 0, "a path without .. that begins with /");
    }
    return this.#transport.send(init.method ?? "GET", target, { headers: init.headers, body: init.body, signal: init.signal, raw: true });
  }

  /** Memory, processes and files to disk; the next call brings them back, where auto-resume is on. */
  async pause(options: CallOptions = {}): Promise<void> {
    this.info = await this.#call("POST", "/pause", { json: {}, signal: options.signal });
  }

  async resume(options: CallOptions & { cold?: boolean; timeout?: number } = {}): Promise<void> {
    const json = { cold: options.cold, timeout_s: options.timeout };
    this.info = await this.#call("POST", "/resume", { json, signal: options.signal });
  }

  /** `count` sandboxes that are what this one is now; it goes on. */
  async fork(count = 1, options: CallOptions & { metadata?: Record<string, string> } = {}): Promise<Sandbox[]> {
    const json = { count, metadata: options.metadata };
    const made = await this.#call<Schemas["SandboxList"]>("POST", "/fork", { json, once: true, signal: options.signal });
    return made.data.map((info) => new Sandbox(this.#transport, info));
  }

  /** Make a template of it as it is now; create with `{ template: name }` clones that. */
  snapshot(name: string, options: CallOptions & { description?: string } = {}): Promise<Schemas["Template"]> {
    return this.#call("POST", "/snapshot", { json: { name, description: options.description }, once: true, signal: options.signal });
  }

  /** What it may reach from now on. */
  async setNetwork(network: Wish["network"], options: CallOptions = {}): Promise<void> {
    await this.#call("PUT", "/network", { json: { network }, signal: options.signal });
  }

  async setTimeout(seconds: number, options: CallOptions = {}): Promise<void> {
    this.info = await this.#call("POST", "/timeout", { json: { timeout_s: seconds }, signal: options.signal });
  }

  async refresh(options: CallOptions = {}): Promise<SandboxInfo> {
    this.info = await this.#call("GET", "", { signal: options.signal });
    return this.info;
  }

  /** End it: memory and files are gone. One that has ended stays as it is. */
  async kill(options: CallOptions = {}): Promise<void> {
    this.info = await this.#call("DELETE", "", { signal: options.signal });
  }

  /** `await using sandbox = await Sandbox.create()` ends it at the end of the block. */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.kill().catch((error: unknown) => {
      if (!(error instanceof NotFoundError)) throw error;
    });
  }

  get #path(): string {
    return `/v1/sandboxes/${segment(this.id)}`;
  }

  #call<T>(method: string, path: string, request: Parameters<Transport["json"]>[2]): Promise<T> {
    return this.#transport.json<T>(method, this.#path + path, request);
  }
}
