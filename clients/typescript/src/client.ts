/** What is not about one sandbox: any route of the server, typed by its description. */

import type { paths } from "./openapi.js";
import { type CallOptions, type ClientOptions, Transport, segment } from "./transport.js";

type Method = "get" | "post" | "put" | "patch" | "delete";
type Operation<P extends keyof paths, M extends Method> = paths[P][M];
type JsonOf<T> = T extends { content: { "application/json": infer B } } ? B : never;
type Answer<O> = O extends { responses: infer R } ? JsonOf<R[keyof R & (200 | 201 | 202)]> : never;
type Body<O> = O extends { requestBody?: infer B } ? JsonOf<NonNullable<B>> : undefined;
type InPath<O> = O extends { parameters: { path: infer P } } ? P : undefined;
type InQuery<O> = O extends { parameters: { query?: infer Q } } ? Q : undefined;

export interface Call<O> extends CallOptions {
  path?: InPath<O>;
  query?: InQuery<O>;
  body?: Body<O>;
}

export class Client {
  readonly #transport: Transport;

  constructor(options: ClientOptions = {}) {
    this.#transport = new Transport(options);
  }

  /**
   * One call of the HTTP API whose answer is JSON, for example
   * `client.request("post", "/v1/volumes", { body: { name: "data", size_mib: 64 } })`.
   */
  request<P extends keyof paths & string, M extends Method & keyof paths[P]>(
    method: M,
    path: P,
    call: Call<Operation<P, M>> = {},
  ): Promise<Answer<Operation<P, M>>> {
    const values = (call.path ?? {}) as Record<string, string | number>;
    const target = path.replace(/\{(\w+)\}/g, (_, name: string) => segment(String(values[name] ?? `{${name}}`)));
    return this.#transport.json(method.toUpperCase(), target, {
      json: call.body, query: call.query as never, signal: call.signal, once: method === "post" && path === "/v1/volumes",
    });
  }
}
