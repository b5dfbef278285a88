export { Client, type Call } from "./client.js";
export type { CodeEvent, CodeOptions, CodeResult, ExecOptions, ExecResult } from "./commands.js";
export * from "./errors.js";
export { Files, type Entry, type FileOptions } from "./files.js";
export type { components, operations, paths } from "./openapi.js";
export { Sandbox, type CreateOptions, type ListOptions, type SandboxInfo } from "./sandbox.js";
export type { CallOptions, ClientOptions } from "./transport.js";
