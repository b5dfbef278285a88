/** Every error of this package, under one root; `outcome` says whether the thing never started or may have happened. */

import type { components } from "./openapi.js";

export type Problem = components["schemas"]["Problem"];
export type Outcome = Problem["outcome"];

/** Something the server was asked to do was not done, or is not known to be done. */
export class LLM4AgentsError extends Error {
  override readonly name: string = "LLM4AgentsError";
  constructor(
    message: string,
    /** Stable: what programs look at, such as `sandbox_not_found`. */
    readonly code: string,
    /** `not_started`: nothing ran, safe to repeat. `unknown`: it may have run. `finished`: it ran to its end. */
    readonly outcome: Outcome,
    /** HTTP status; 0 when there was no answer. */
    readonly status: number,
    /** What to do next. */
    readonly hint: string | null = null,
    readonly details: Record<string, unknown> = {},
    options?: ErrorOptions,
  ) {
    super(hint ? `${message} (${hint})` : message, options);
  }
}

/** The request itself is wrong. */
export class InvalidRequestError extends LLM4AgentsError {
  override readonly name: string = "InvalidRequestError";
}
/** No key, or one that is not known, is revoked or has expired. */
export class AuthenticationError extends LLM4AgentsError {
  override readonly name = "AuthenticationError";
}
/** The key is good, and this is not for it. */
export class ForbiddenError extends LLM4AgentsError {
  override readonly name = "ForbiddenError";
}
/** The project has as much of it as it may have, or asks too fast. */
export class QuotaError extends LLM4AgentsError {
  override readonly name = "QuotaError";
}
/** There is nothing of that name: sandbox, template, file, volume. */
export class NotFoundError extends LLM4AgentsError {
  override readonly name: string = "NotFoundError";
}
/** The state of the thing forbids this. */
export class ConflictError extends LLM4AgentsError {
  override readonly name = "ConflictError";
}
/** The node has no room for it. */
export class CapacityError extends LLM4AgentsError {
  override readonly name = "CapacityError";
}
/** The sandbox ended under the call. */
export class SandboxDiedError extends LLM4AgentsError {
  override readonly name = "SandboxDiedError";
}
/** The deadline of the call passed; what it had started was ended. */
export class TimedOutError extends LLM4AgentsError {
  override readonly name = "TimedOutError";
}
/** No server answers. */
export class ServerUnavailableError extends LLM4AgentsError {
  override readonly name = "ServerUnavailableError";
}
/** The connection broke in mid-call: it may have run. */
export class ConnectionLostError extends LLM4AgentsError {
  override readonly name = "ConnectionLostError";
}

const CLASSES: Record<string, typeof LLM4AgentsError> = {
  invalid_request: InvalidRequestError,
  unauthenticated: AuthenticationError,
  forbidden: ForbiddenError,
  protected_path: ForbiddenError,
  quota: QuotaError,
  not_found: NotFoundError,
  sandbox_not_found: NotFoundError,
  template_not_found: NotFoundError,
  path_not_found: NotFoundError,
  conflict: ConflictError,
  sandbox_paused: ConflictError,
  capacity: CapacityError,
  sandbox_died: SandboxDiedError,
  timed_out: TimedOutError,
  server_unavailable: ServerUnavailableError,
  connection_lost: ConnectionLostError,
};

/** The error that a problem-details body describes; one of an unknown code keeps what it says. */
export function fromProblem(body: Partial<Problem>, status: number): LLM4AgentsError {
  const code = body.code ?? "error";
  const known = CLASSES[code] ?? (status >= 400 && status < 500 ? InvalidRequestError : LLM4AgentsError);
  return new known(
    body.detail ?? body.title ?? `HTTP ${status}`,
    code,
    body.outcome ?? (status < 500 ? "not_started" : "unknown"),
    status,
    body.hint ?? null,
    (body.details as Record<string, unknown> | undefined) ?? {},
  );
}
