/** Files of one sandbox. Paths are absolute, or taken from the user's home (`/home/user`). */

import type { components } from "./openapi.js";
import { type CallOptions, type Transport, segment } from "./transport.js";

export type Entry = components["schemas"]["Entry"];
export interface FileOptions extends CallOptions {
  /** As whom, by name or number; else whom the template says, or `user`. */
  user?: string;
}

const HOME = "/home/user";

function guest(path: string): string {
  if (path === "~" || path.startsWith("~/")) return HOME + path.slice(1);
  return path.startsWith("/") ? path : `${HOME}/${path}`;
}

export class Files {
  readonly #transport: Transport;
  readonly #path: string;

  constructor(transport: Transport, sandbox: string) {
    this.#transport = transport;
    this.#path = `/v1/sandboxes/${segment(sandbox)}/files`;
  }

  /** The bytes of a file. Throws NotFoundError. */
  async read(path: string, options: FileOptions & { offset?: number; length?: number } = {}): Promise<Uint8Array> {
    const { signal, ...query } = options;
    const response = await this.#transport.send("GET", this.#path, { signal, query: { ...query, path: guest(path) } });
    return new Uint8Array(await response.arrayBuffer());
  }

  async readText(path: string, options: FileOptions = {}): Promise<string> {
    return new TextDecoder("utf-8", { fatal: true }).decode(await this.read(path, options));
  }

  /** A file of any size, as it comes. */
  async stream(path: string, options: FileOptions = {}): Promise<ReadableStream<Uint8Array>> {
    const { signal, ...query } = options;
    const response = await this.#transport.send("GET", this.#path, { signal, query: { ...query, path: guest(path) } });
    return response.body!;
  }

  /** Write a whole file; directories above it are made. A failed write leaves what was there. */
  async write(
    path: string,
    data: string | Uint8Array | AsyncIterable<Uint8Array>,
    options: FileOptions = {},
  ): Promise<components["schemas"]["Written"]> {
    const { signal, ...query } = options;
    return this.#transport.json("PUT", this.#path, {
      signal, body: data as BodyInit, query: { ...query, path: guest(path) },
      headers: { "content-type": "application/octet-stream" },
    });
  }

  async stat(path: string, options: FileOptions = {}): Promise<Entry> {
    const { signal, ...query } = options;
    return this.#transport.json("GET", `${this.#path}/stat`, { signal, query: { ...query, path: guest(path) } });
  }

  /** Whether there is such a file or directory. */
  async exists(path: string, options: FileOptions = {}): Promise<boolean> {
    try {
      await this.stat(path, options);
      return true;
    } catch (error) {
      if ((error as { code?: string }).code === "path_not_found") return false;
      throw error;
    }
  }

  async list(path = HOME, options: FileOptions = {}): Promise<Entry[]> {
    const { signal, ...query } = options;
    const found = await this.#transport.json<components["schemas"]["Listing"]>("GET", `${this.#path}/list`, {
      signal, query: { ...query, path: guest(path) },
    });
    return found.entries;
  }

  async mkdir(path: string, options: FileOptions & { parents?: boolean; mode?: number } = {}): Promise<void> {
    const { signal, ...body } = options;
    await this.#transport.json("POST", `${this.#path}/mkdir`, { signal, json: { ...body, path: guest(path) } });
  }

  async move(from: string, to: string, options: FileOptions & { overwrite?: boolean } = {}): Promise<void> {
    const { signal, ...body } = options;
    await this.#transport.json("POST", `${this.#path}/move`, { signal, json: { ...body, from: guest(from), to: guest(to) } });
  }

  async remove(path: string, options: FileOptions & { recursive?: boolean; missing_ok?: boolean } = {}): Promise<void> {
    const { signal, ...body } = options;
    await this.#transport.json("POST", `${this.#path}/remove`, { signal, json: { ...body, path: guest(path) } });
  }
}
