/** HTTP to one server by `fetch`: a JSON call, or a stream of lines or bytes. Errors are mapped here. */

import { ConnectionLostError, InvalidRequestError, LLM4AgentsError, ServerUnavailableError, fromProblem } from "./errors.js";

export interface ClientOptions {
  /** The server's address; default: the environment's `LLM4AGENTS_URL`. */
  url?: string;
  /** Default: the environment's `LLM4AGENTS_API_KEY`. */
  apiKey?: string;
  /** Another `fetch` (a proxy's, a test's). A server's own CA: start node with `NODE_EXTRA_CA_CERTS=ca.pem`. */
  fetch?: typeof fetch;
}

export interface CallOptions {
  /** Ends the call. What it had started in a sandbox goes on unless the call says otherwise. */
  signal?: AbortSignal;
}

type Query = Record<string, string | number | boolean | null | undefined>;
export interface Request extends CallOptions {
  query?: Query;
  json?: unknown;
  body?: BodyInit | AsyncIterable<Uint8Array>;
  headers?: Record<string, string>;
  /** A call that must happen once: it has an idempotency key, and is sent again when its connection breaks. */
  once?: boolean;
  /** The answer whatever its status, redirects too: it is not the server's but a guest's. */
  raw?: boolean;
}

const ATTEMPTS = 3;

export class Transport {
  readonly url: string;
  readonly #key: string | undefined;
  readonly #fetch: typeof fetch;

  constructor(options: ClientOptions = {}) {
    const env = typeof process === "undefined" ? {} : process.env;
    const url = options.url ?? env["LLM4AGENTS_URL"];
    if (!url) {
      throw new InvalidRequestError(
        "no server is named", "invalid_request", "not_started", 0,
        "set LLM4AGENTS_URL, or give { url }; `llm4agents server run --listen` starts one",
      );
    }
    if (!/^https?:\/\//.test(url)) {
      throw new InvalidRequestError(`${url} is not a URL`, "invalid_request", "not_started", 0, "for example https://sandboxes.example.org");
    }
    this.url = url.replace(/\/+$/, "");
    this.#key = options.apiKey ?? env["LLM4AGENTS_API_KEY"];
    if (this.#key && !/^[!-~]+$/.test(this.#key)) {
      throw new InvalidRequestError("the API key has letters that no key has", "invalid_request", "not_started", 0, "is LLM4AGENTS_API_KEY whole, without quotes and blanks?");
    }
    this.#fetch = options.fetch ?? fetch;
  }

  /** The answer of a call that succeeded; its body is the caller's to read. */
  async send(method: string, path: string, request: Request = {}): Promise<Response> {
    const headers: Record<string, string> = { ...request.headers };
    if (this.#key) headers["authorization"] = `Bearer ${this.#key}`;
    let body = request.body as BodyInit | undefined;
    if (request.json !== undefined) {
      body = JSON.stringify(request.json);
      headers["content-type"] = "application/json";
    }
    if (request.once) headers["idempotency-key"] = crypto.randomUUID();
    const streamed = request.body !== undefined && typeof request.body === "object" && Symbol.asyncIterator in request.body;
    const target = this.url + path + search(request.query);
    for (let attempt = 1; ; attempt++) {
      let response: Response;
      try {
        response = await this.#fetch(target, {
          method, headers, body, signal: request.signal, redirect: request.raw ? "manual" : "error",
          ...(streamed ? { duplex: "half" } : {}),
        } as RequestInit);
      } catch (error) {
        if (request.signal?.aborted) throw request.signal.reason;
        const again = request.once || method === "GET";
        if (again && attempt < ATTEMPTS) {
          await new Promise((resolve) => setTimeout(resolve, 100 * 2 ** attempt));
          continue;
        }
        throw unreachable(this.url, error, method === "GET" || refused(error));
      }
      if (response.ok || request.raw) return response;
      throw fromProblem(await problemOf(response), response.status);
    }
  }

  async json<T>(method: string, path: string, request: Request = {}): Promise<T> {
    const response = await this.send(method, path, request);
    try {
      return (await response.json()) as T;
    } catch (error) {
      throw lost(error);
    }
  }

  /** The objects of an NDJSON answer as they come. Breaking off the loop ends the call. */
  async *lines<T extends { type: string }>(method: string, path: string, request: Request, ends: (line: T) => boolean): AsyncGenerator<T> {
    const headers = { accept: "application/x-ndjson", ...request.headers };
    const response = await this.send(method, path, { ...request, headers });
    if (!response.body) throw lost(undefined);
    const reader = response.body.getReader();
    const decoder = new TextDecoder();
    let rest = "";
    let whole = false;
    try {
      while (!whole) {
        let piece: Awaited<ReturnType<typeof reader.read>>;
        try {
          piece = await reader.read();
        } catch (error) {
          if (request.signal?.aborted) throw request.signal.reason;
          throw lost(error);
        }
        rest += decoder.decode(piece.value, { stream: !piece.done });
        const found = rest.split("\n");
        rest = found.pop() ?? "";
        for (const text of found) {
          if (!text) continue;
          const line = JSON.parse(text) as T & Record<string, unknown>;
          if (line.type === "error" && "outcome" in line) throw fromProblem(line as never, Number(line["status"] ?? 500));
          whole ||= ends(line);
          yield line;
        }
        if (piece.done && !whole) throw lost(undefined);
      }
    } finally {
      await reader.cancel().catch(() => undefined);
    }
  }
}

function search(query: Query | undefined): string {
  const found = new URLSearchParams();
  for (const [name, value] of Object.entries(query ?? {})) {
    if (value !== undefined && value !== null) found.set(name, String(value));
  }
  return found.size ? `?${found}` : "";
}

async function problemOf(response: Response): Promise<Record<string, unknown>> {
  const text = await response.text().catch(() => "");
  try {
    const body: unknown = JSON.parse(text);
    if (body && typeof body === "object") return body as Record<string, unknown>;
  } catch {
    // Something that is not ours answered: a proxy.
  }
  return {
    detail: `HTTP ${response.status}: ${text.slice(0, 200).split(/\s+/).join(" ").trim() || response.statusText}`,
    hint: "no server of ours says that: is LLM4AGENTS_URL right, or is it a proxy's answer?",
  };
}

function refused(error: unknown): boolean {
  const code = codeOf(error);
  return code === "ECONNREFUSED" || code === "ENOTFOUND" || code === "EAI_AGAIN" || code === NO_TLS || untrusted(code);
}

const NO_TLS = "ERR_SSL_WRONG_VERSION_NUMBER";

function codeOf(error: unknown): string {
  return (error as { cause?: { code?: string } }).cause?.code ?? "";
}

/** A certificate that is not believed: TLS came to nothing, so no request has been sent. */
function untrusted(code: string): boolean {
  return /CERT|_LEAF_SIGNATURE/.test(code);
}

function hintOf(url: string, code: string): string {
  if (untrusted(code)) return "a CA of the server's own: start node with NODE_EXTRA_CA_CERTS=ca.pem (on the server: llm4agents server ca --pem)";
  if (code === NO_TLS) return "what answers there has no TLS: is it http:// in LLM4AGENTS_URL?";
  return `is LLM4AGENTS_URL right?${url.startsWith("http:") ? " If the server has TLS, it is https://…" : ""}`;
}

function unreachable(url: string, error: unknown, notStarted: boolean): LLM4AgentsError {
  const cause = (error as { cause?: Error }).cause;
  const code = codeOf(error);
  const words = code === NO_TLS ? "wrong version number" : cause?.message || code || String(error);
  return notStarted
    ? new ServerUnavailableError(`${url} does not answer: ${words}`, "server_unavailable", "not_started", 0, hintOf(url, code), {}, { cause: error })
    : lost(error);
}

function lost(error: unknown): ConnectionLostError {
  return new ConnectionLostError(
    "the connection was lost in the middle of the call", "connection_lost", "unknown", 0,
    "it may have run; look at its effects before running it again", {}, { cause: error },
  );
}

/** A part of a path. */
export function segment(name: string): string {
  return encodeURIComponent(name);
}
