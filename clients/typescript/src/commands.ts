/** Running commands and code, with output as it comes. Non-zero exits and exceptions in a sandbox are results, no errors. */

import type { components } from "./openapi.js";
import { type CallOptions, type Transport, segment } from "./transport.js";

type Schemas = components["schemas"];
export type ExecResult = Pick<Schemas["ExecResult"], "exit_code" | "signal" | "timed_out" | "duration_ms"> & {
  stdout: string;
  stderr: string;
  /** Whether it ended by itself with 0. */
  ok: boolean;
};
export interface ExecOptions extends CallOptions {
  env?: Record<string, string>;
  cwd?: string;
  user?: string;
  /** Seconds; 0: none. Default 60. What it started is ended then. */
  timeout?: number;
  stdin?: string | Uint8Array;
  /** What happens to the command when this call ends early. Default: it goes on. */
  onDisconnect?: "detach" | "kill";
  onStdout?: (text: string) => void;
  onStderr?: (text: string) => void;
}
export type CodeResult = Schemas["CodeResult"] & {
  /** The text form of the last value, or null. */
  text: string | null;
};
export type CodeEvent = Schemas["CodeResultLine"] | Schemas["CodeTextLine"] | Schemas["CodeErrorLine"] | Schemas["CodeEndLine"];
export interface CodeOptions extends CallOptions {
  /** `python`, `bash`, `javascript` or `typescript`; default: the template's. */
  language?: string;
  /** A context of its own state. */
  context?: string;
  env?: Record<string, string>;
  /** Seconds; 0: none. Default 300. */
  timeout?: number;
  onStdout?: (text: string) => void;
  onStderr?: (text: string) => void;
  onResult?: (result: Schemas["CodeResultBase"]) => void;
}

function base64(data: string | Uint8Array): string {
  const bytes = typeof data === "string" ? new TextEncoder().encode(data) : data;
  let text = "";
  for (let at = 0; at < bytes.length; at += 32_768) text += String.fromCharCode(...bytes.subarray(at, at + 32_768));
  return btoa(text);
}

function bytes(data: string): Uint8Array {
  return Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
}

/** A string goes through the guest's shell, a list of words does not. */
export async function exec(transport: Transport, sandbox: string, command: string | string[], options: ExecOptions = {}): Promise<ExecResult> {
  const said = { stdout: "", stderr: "" };
  const decoders = { stdout: new TextDecoder(), stderr: new TextDecoder() };
  const tell = { stdout: options.onStdout, stderr: options.onStderr };
  const json = {
    ...(typeof command === "string" ? { command } : { argv: command }),
    env: options.env, cwd: options.cwd, user: options.user, timeout_s: options.timeout,
    stdin: options.stdin === undefined ? undefined : base64(options.stdin),
    on_disconnect: options.onDisconnect, stream: true,
  };
  const path = `/v1/sandboxes/${segment(sandbox)}/exec`;
  const lines = transport.lines<Schemas["ExecLine"]>("POST", path, { json, signal: options.signal }, (line) => line.type === "exit");
  let end: Schemas["ExecExitLine"] | undefined;
  const say = (channel: "stdout" | "stderr", text: string): void => {
    said[channel] += text;
    if (text) tell[channel]?.(text);
  };
  for await (const line of lines) {
    if (line.type === "stdout" || line.type === "stderr") {
      const output = line as Schemas["OutputLine"];
      say(output.type, decoders[output.type].decode(bytes(output.data_b64), { stream: true }));
    } else if (line.type === "exit") {
      end = line as Schemas["ExecExitLine"];
    }
  }
  for (const channel of ["stdout", "stderr"] as const) say(channel, decoders[channel].decode());
  const { exit_code, signal, timed_out, duration_ms } = end!;
  return { ...said, exit_code, signal, timed_out, duration_ms, ok: exit_code === 0 };
}

/** The events of a cell as they come; the last is `end`. */
export function streamCode(transport: Transport, sandbox: string, code: string, options: CodeOptions = {}): AsyncGenerator<CodeEvent> {
  const json = { code, language: options.language, context: options.context, env: options.env, timeout_s: options.timeout, stream: true };
  const path = `/v1/sandboxes/${segment(sandbox)}/code`;
  return transport.lines<CodeEvent>("POST", path, { json, signal: options.signal }, (line) => line.type === "end");
}

export async function runCode(transport: Transport, sandbox: string, code: string, options: CodeOptions = {}): Promise<CodeResult> {
  const found: CodeResult = {
    status: "ok", execution_count: 0, duration_ms: 0, results: [], stdout: "", stderr: "", error: null, truncated: false, text: null,
  };
  for await (const line of streamCode(transport, sandbox, code, options)) {
    switch (line.type) {
      case "stdout": case "stderr": {
        const { type, text } = line as Schemas["CodeTextLine"];
        found[type] += text;
        (type === "stdout" ? options.onStdout : options.onStderr)?.(text);
        break;
      }
      case "result": {
        const { main, data } = line as Schemas["CodeResultLine"];
        found.results.push({ main, data });
        if (main) found.text = (data as Record<string, string>)["text/plain"] ?? null;
        options.onResult?.({ main, data });
        break;
      }
      case "error": {
        const { name, value, traceback } = line as Schemas["CodeErrorLine"];
        found.error = { name, value, traceback };
        break;
      }
      case "end": {
        const end = line as Schemas["CodeEndLine"];
        found.status = end.status;
        found.execution_count = end.execution_count;
        found.duration_ms = end.duration_ms;
      }
    }
  }
  return found;
}
