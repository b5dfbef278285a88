"""Every bound in one place, unit last in its name. Changing one is a change of SPECIFICATION.md."""

from __future__ import annotations

from typing import Final

# Guest protocol (docs/design/protocol.md)
FRAME_PAYLOAD_BYTES_MAX: Final = 65_536
STREAM_CREDIT_BYTES: Final = 262_144
STREAM_WINDOW_BYTES_MAX: Final = 4_194_304
HUNT_BYTES_MAX: Final = 8_388_608
STREAMS_PER_SESSION_MAX: Final = 1_024
CONTROL_BYTES_MAX: Final = 65_536
HELLO_TIMEOUT_S: Final = 5.0
PATH_BYTES_MAX: Final = 4_096
LOCAL_NAME_BYTES_MAX: Final = 200
"""Of a file of the node that a call names: what it is called while it is written is longer by some."""
LIST_ENTRIES_MAX: Final = 100_000
HELLO_RETRY_S: Final = 2.0
"""A HELLO not answered in this time is sent again under a new nonce (bytes sent to a stopped VM are lost)."""
RECV_BYTES_MAX: Final = 262_144
OUT_BYTES_MAX: Final = 262_144
"""What a session queues towards its guest before writers wait."""
WINDOW_TOTAL_BYTES_MAX: Final = 67_108_864
"""All raised windows of one session together; past it a stream keeps STREAM_CREDIT_BYTES."""
UNPAID_FRAMES_PER_S_MAX: Final = 1_000
"""Frames that cost a guest no credit (EVENT, empty DATA); more ends the session."""
LIST_BYTES_MAX: Final = 67_108_864
SEARCH_MATCHES_MAX: Final = 10_000
SEARCH_BYTES_MAX: Final = 16_777_216
VERB_TIMEOUT_S: Final = 30.0
STALL_TIMEOUT_S: Final = 60.0
"""How long a file transfer may make no progress."""
TREE_TIMEOUT_S: Final = 300.0
"""How long a search or a change of a whole tree may take, and a tar of one find nothing to send."""
EXEC_GRACE_S: Final = 5.0
"""How long after an exec's own timeout the host still waits for the agent's END."""
CODE_MESSAGE_BYTES_MAX: Final = 33_554_432
CODE_INTERRUPT_GRACE_S: Final = 5.0
"""How long an interrupted cell has to end before its worker is replaced."""
PROCESSES_MAX: Final = 1_024 + 256
"""Managed processes of a sandbox: those that run, and those that have ended and are not forgotten."""
PROCESS_LIST_BYTES_MAX: Final = 8_388_608

# Boot and clone
BOOT_TIMEOUT_S: Final = 90.0
BOOT_TRIES: Final = 2
BUILD_TIMEOUT_S: Final = 900.0
RESTORE_TIMEOUT_S: Final = 15.0
KVM_PROBE_TIMEOUT_S: Final = 5.0
KVM_PROBE_KEPT_S: Final = 600.0
"""How long it is believed that a kernel with KVM says nothing."""
VM_STOP_TIMEOUT_S: Final = 5.0
KEEPER_GRACE_S: Final = 5.0
"""How long after a deadline the keeper waits for a live server to act before it ends the VM itself."""
SERIAL_LOG_BYTES_MAX: Final = 1_048_576

# Templates of one's own
STEPS_MAX: Final = 200
STEP_PACKAGES_MAX: Final = 500
STEP_COMMAND_BYTES_MAX: Final = 49_152
STEP_TIMEOUT_S: Final = 1_800
STEP_TIMEOUT_S_MAX: Final = 14_400
STEP_OUTPUT_TAIL_BYTES: Final = 4_096
"""Of what a failed step said last, in its error."""
RECIPE_BYTES_MAX: Final = 1_048_576
READY_TIMEOUT_S: Final = 60
READY_TIMEOUT_S_MAX: Final = 600
SHAPES_MAX: Final = 24
"""Of one built-in template that are kept beside its own: anybody's create may ask for another."""
BUILDS_PER_PROJECT_MAX: Final = 8
"""Under way at once."""
STEPS_CACHE_BYTES_MAX: Final = 21_474_836_480
"""Of the disks kept after steps, all together; of the project that has most, those used least recently go first."""
BUILD_LOG_BYTES_MAX: Final = 4_194_304
"""Of what one build has said; the newest is kept."""
BUILD_LOG_LINE_BYTES_MAX: Final = 8_192
BUILD_LOGS_MAX: Final = 256
"""Of templates, one each; of the project that has most, those of the oldest builds go first."""
COPY_BYTES_MAX: Final = 2_147_483_648
"""Of the files of one copy, as a tar."""
COPY_ENTRIES_MAX: Final = 200_000
COPIES_BYTES_MAX: Final = 8_589_934_592
"""Of what a project has sent for copies; what was used least recently goes first."""

# Shapes
VCPUS_MIN: Final = 1
VCPUS_MAX: Final = 8
MEMORY_MIB_MIN: Final = 256
MEMORY_MIB_MAX: Final = 16_384
MEMORY_MIB_STEP: Final = 128
DISK_GIB: Final = 5
DISK_MIB_MIN: Final = 64
PIDS_MIN: Final = 16
PIDS_MAX: Final = 32_768
OUTPUT_BYTES_PER_S_MIN: Final = 1_024
LAYERS_MAX: Final = 8
"""Of a sandbox's disk, above its template's; more are merged at a pause."""
FORKS_MAX: Final = 64
KEEP_S: Final = 30 * 86_400
KEEP_S_MAX: Final = 365 * 86_400
VOLUME_SLOTS: Final = 4
VOLUME_SLOT_BYTES: Final = 1_048_576
VOLUMES_PER_SANDBOX_MAX: Final = VOLUME_SLOTS - 1
"""`vol0` is for protected paths."""
VOLUME_MIB_MIN: Final = 8
VOLUME_MIB_MAX: Final = 1_048_576
VOLUMES_MAX: Final = 1_000
"""Of a project, snapshots of volumes included."""
VOLUME_FLUSH_S: Final = 10.0
"""How long the end of a sandbox waits for what it has written to volumes to be in them."""
VOLUME_READER_IDLE_S: Final = 5.0
"""How long the machine that reads a detached volume's files stays for the next call."""
VOLUME_READERS_PER_PROJECT_MAX: Final = 4
"""Such machines of one project at once; they are in none of its quotas."""
VOLUME_READER_S: Final = 600.0
"""How long it stays at most after its server died, or in one call."""
TB_SIZE_MIB: Final = 128
CLOSURE_BYTES_MAX: Final = 536_870_912
"""Program, libraries and firmware of one VMM: the root it is jailed in."""
CLOSURE_KEPT_S: Final = 30 * 86_400
"""How long such a root stays after its last use, once another is made."""
CLOSURE_BUILD_S: Final = 3_600
"""How old what a build has left must be to be taken for that of a killed one."""
VMM_MEMORY_MIB: Final = 512
"""What a VMM's cgroup may take beyond its guest's memory: heap, translation cache, page cache of its disks."""
ENTROPY_BYTES_PER_S: Final = 65_536
"""What a guest may draw by its entropy device: its kernel wants 64 at a time, now and then."""
VMM_PROCESSES_MAX: Final = 128
"""Threads of one VMM."""
MEMORY_COMMIT: Final = 0.15
"""The part of its memory a sandbox is charged at admission: an idle one has touched 3%, one with pandas at work 10%."""
WAIT_S_MAX: Final = 3_600
"""How long a create may queue for room."""
POOL_MAX: Final = 256
"""Machines kept ready, of all templates together."""

# Defaults of the API
DEFAULT_TEMPLATE: Final = "python"
DEFAULT_VCPUS: Final = 1
DEFAULT_MEMORY_MIB: Final = 1_024
IDLE_TIMEOUT_S: Final = 300
IDLE_TIMEOUT_S_MAX: Final = 86_400
LIFE_S_MAX: Final = 86_400
CODE_TIMEOUT_S: Final = 300
EXEC_TIMEOUT_S: Final = 60

# API
EXEC_OUTPUT_BYTES_MAX: Final = 16_777_216
"""What a waited-for (not streamed) exec keeps of each of stdout and stderr; the rest is counted and dropped."""
OUTPUT_BYTES_MAX: Final = 4_194_304
"""Of a process's output in one answer; the next reads on."""
WEBSOCKET_MESSAGE_BYTES_MAX: Final = 16_777_216
"""Either way, and of a guest's own WebSockets too."""
WEBSOCKET_FRAMES_MAX: Final = 16_384
"""That one message may come in, where messages are read."""
WEBSOCKET_FRAMES_KEPT: Final = 256
"""A message of more goes on in other frames than it came in."""
WEBSOCKET_CONTROLS_MAX: Final = 64
"""Pings and pongs in one piece (64 KiB) of what is received, where messages are read."""
CODE_OUTPUT_BYTES_MAX: Final = 16_777_216
CODE_BYTES_MAX: Final = 4_194_304
CODE_CONTEXTS_MAX: Final = 15
"""Of one sandbox, beside the `default` one of each language."""
ARGV_BYTES_MAX: Final = 65_536 - 4_096
ENV_BYTES_MAX: Final = 32_768
METADATA_BYTES_MAX: Final = 16_384
SERVER_IDLE_EXIT_S: Final = 60.0
SERVER_START_TIMEOUT_S: Final = 30.0
REQUEST_BODY_BYTES_MAX: Final = 33_554_432
"""Of a request's body, except a file's: those stream through and are as large as the sandbox's disk."""
DISK_FREE_BYTES_MIN: Final = 512 * 1_048_576
"""Below this much free disk under the state directory nothing new is created."""

# The listener: what whoever can reach its port may make it hold (docs/howto/run-a-server.md)
LISTEN_CONNECTIONS_MAX: Final = 4_096
LISTEN_CONNECTIONS_PER_ADDRESS_MAX: Final = 512
"""Of one address that is no trusted proxy."""
LISTEN_REQUESTS_MAX: Final = 2_048
"""Under way at once, of all connections."""
LISTEN_REQUESTS_CROWDED: Final = 128
"""Of them, once half are taken: what one address has at most, and what one project has."""
LISTEN_BACKLOG: Final = 1_024
LISTEN_HANDSHAKE_S: Final = 10.0
LISTEN_HEAD_S: Final = 10.0
"""From a request's first byte (a connection's beginning, for its first) to the end of its head."""
LISTEN_BODY_STALL_S: Final = 30.0
"""How long a request's body may send nothing while it is waited for."""
LISTEN_BODY_BYTES_PER_S_MIN: Final = 1_024
"""Sustained, of a body that is read whole (JSON), after LISTEN_BODY_STALL_S."""
LISTEN_KEEP_ALIVE_S: Final = 75
LISTEN_LINGER_S: Final = 2.0
"""How long what a refused client still sends is read, so that it gets to read why."""
LISTEN_GONE_S: Final = 5.0
"""How often it is looked whether the client of a WebSocket that is not read is still there."""
LISTEN_HEAD_BYTES_MAX: Final = 32_768
LISTEN_HEADERS_MAX: Final = 128
LISTEN_BODIES_BYTES_MAX: Final = 268_435_456
"""Of all bodies that are read whole, at once; and as much again of WebSocket messages that are not read yet."""
LISTEN_SHARE_BYTES: Final = 262_144
"""What each request, and each WebSocket, may have of it whoever has used it up."""
LISTEN_REGISTER_BYTES_MAX: Final = 16_384
"""Of a request's body for which no key is needed."""
LISTEN_SLICE_S: Final = 0.004
"""How long one connection's bytes are worked on before the others' are."""
LISTEN_PIECE_BYTES: Final = 4_096
"""Of a connection's bytes at once, to begin with: more of those that are little work, less of the others."""
LISTEN_STREAMS_MAX: Final = 100
"""Of one HTTP/2 connection, at once."""
LISTEN_STREAM_WINDOW_BYTES: Final = 262_144
LISTEN_WINDOW_BYTES: Final = 2_097_152
"""What one HTTP/2 connection may send ahead of who reads it."""
LISTEN_RESETS_BURST: Final = 500
"""HTTP/2 streams a client takes back (browsers do, on leaving a page); more are an attack and end the connection."""
LISTEN_RESETS_PER_S: Final = 50
LISTEN_CONTROL_BURST: Final = 2_000
"""Frames that say nothing, of HTTP/2 (ping, settings, empty, of no stream, more windows than data) and WebSockets."""
LISTEN_CONTROL_PER_S: Final = 200
WEBSOCKET_MESSAGES_BURST: Final = 4_000
WEBSOCKET_MESSAGES_PER_S: Final = 2_000
"""Of one WebSocket of the listener's; more wait."""
LISTEN_DRAIN_S: Final = 30.0
HEALTH_KEPT_S: Final = 2.0
"""How long an answer of /health is good for the next who asks."""
HEALTH_TIMEOUT_S: Final = 5.0
TLS_LEAF_S: Final = 90 * 86_400
TLS_RENEW_S: Final = 30 * 86_400
"""Before its end a certificate of the local CA is replaced."""
TLS_LOOK_S: Final = 3_600.0

# Ports of sandboxes, through the server
PORT_CONNECTIONS_MAX: Final = 512
"""Of one sandbox: its session's streams are also for commands and files."""
PORT_IDLE_CONNECTIONS_MAX: Final = 32
PORT_IDLE_S: Final = 4.0
"""How long a connection is kept for the next request; servers close idle ones after 5 s or later."""
PORT_HEAD_BYTES_MAX: Final = 65_536
"""Of an answer's status line and headers."""
PORT_EXPECT_S: Final = 1.0
"""How long a client's `Expect: 100-continue` is left to the guest before the body is sent all the same."""
PORT_BODY_S: Final = 0.05
"""How long an HTTP/2 request without a length may take to say whether it has a body."""
PORT_INTERIM_MAX: Final = 64
"""Interim answers (1xx) that are read before the answer."""
PORT_PROOFS_MAX: Final = 4
"""Tokens, and cookies, of one request that are looked at."""
PORT_URL_S: Final = 3_600.0
PORT_URL_S_MAX: Final = 30 * 86_400.0
"""How long a signed URL holds: by default, and at most."""

# MCP over HTTP

MCP_SESSIONS_MAX: Final = 256
MCP_SESSIONS_PER_PROJECT_MAX: Final = 64
MCP_SESSION_IDLE_S: Final = 1_800.0
"""A session without a request for so long is ended; its default sandbox is left to its own timeouts."""
MCP_CONVERSATIONS_MAX: Final = 1_024
"""Of whose default sandbox is known; the longest unused one is forgotten for another."""
MCP_CONVERSATIONS_PER_PROJECT_MAX: Final = 256
MCP_CONVERSATION_S: Final = 86_400.0
"""How long an unused one is known: as long as its paused sandbox is kept."""

# Jobs, logs
JOBS_PER_SANDBOX_MAX: Final = 64
"""That are not over."""
JOBS_ENDED_KEPT: Final = 256
"""Of one sandbox, that are over: the newest, each with what its last runs said."""
JOB_RUNS_KEPT: Final = 100
JOB_OUTPUT_BYTES_KEPT: Final = 65_536
"""The end of a run's output, kept with its result."""
WEBHOOK_URL_BYTES_MAX: Final = 2_048
WEBHOOK_TIMEOUT_S: Final = 20.0
WEBHOOK_CONNECT_TIMEOUT_S: Final = 6.0
"""For each address of a name: three that do not answer are tried within the whole."""
SANDBOX_LOG_BYTES_MAX: Final = 262_144
CONSOLE_BYTES_MAX: Final = 8_192
"""The end of a console that is told or kept."""

# Images from registries (images/oci): what is read may be anybody's
OCI_DOCUMENT_BYTES_MAX: Final = 4_194_304
"""Of a manifest, an index, a configuration."""
OCI_INDEX_ENTRIES_MAX: Final = 1_024
OCI_LAYERS_MAX: Final = 256
OCI_LAYER_BYTES_MAX: Final = 8 << 30
"""Of one layer as it is kept (mostly compressed)."""
OCI_LAYERS_BYTES_MAX: Final = 16 << 30
OCI_UNPACKED_BYTES_MAX: Final = 32 << 30
"""Of all layers' tars together, and of the root file system."""
OCI_RATIO_MAX: Final = 200
"""How many bytes one byte of a layer may unpack to, past OCI_RATIO_FREE_BYTES."""
OCI_RATIO_FREE_BYTES: Final = 256 << 20
OCI_ENTRIES_MAX: Final = 500_000
"""Of all layers together, with what later ones replace."""
OCI_DEPTH_MAX: Final = 128
OCI_HEADER_BYTES_MAX: Final = 1_048_576
"""Of what one member of a tar says of itself before its content: long names, extended attributes."""
OCI_SPARSE_EXTENTS_MAX: Final = 65_536
OCI_NOTES_MAX: Final = 100
OCI_DOWNLOADS_MAX: Final = 4
"""Layers of one image that are fetched at once."""
OCI_TRIES: Final = 5
OCI_CONNECT_TIMEOUT_S: Final = 15.0
OCI_READ_TIMEOUT_S: Final = 60.0
"""How long a registry may say nothing."""
OCI_WAIT_S_MAX: Final = 30.0
"""How long is waited before a request is made again, whatever the registry asks for."""
OCI_REDIRECTS_MAX: Final = 5
OCI_WORKER_MEMORY_BYTES: Final = 4 << 30
"""Address space of the process that reads an image's layers."""
OCI_WORKER_CPU_S: Final = 1_800

# Network (docs/design/barrier.md). The addresses are baked into templates: every sandbox has the same.
GUEST_MAC: Final = "02:4c:34:00:00:01"
GATEWAY_MAC: Final = "02:4c:34:00:00:02"
GUEST_ADDRESS: Final = "198.19.255.2"
GATEWAY_ADDRESS: Final = "198.19.255.1"
LINK_PREFIX: Final = 30
LINK_MTU_BYTES: Final = 1_500
SYNTHETIC_NET: Final = "198.18.0.0/16"
SYNTHETIC_NAMES_MAX: Final = 16_384
"""Names one sandbox can have an address for."""
TCP_REDIRECT_PORT: Final = 9_000
DNS_REDIRECT_PORT: Final = 5_353
PACKET_LOG_GROUP: Final = 5
PACKET_LOG_BYTES: Final = 160
"""Of each refused packet, from its network header on."""
PACKET_LOG_PER_S: Final = 50
"""For each reason there is to refuse one."""
PACKET_LOG_MANY: Final = 1_000
"""Of a flood one in so many is logged, and stands for them all."""
LINK_CONNECTIONS_MAX: Final = 2_048
"""Open or half-open at once, of one sandbox; FLOWS_PER_SANDBOX_MAX is what the gateway serves of them."""
LINK_CONNECTIONS_PER_S: Final = 2_000
LINK_QUERIES_PER_S: Final = 1_000
LINK_BACKLOG: Final = 4_096
LINKS_READY: Final = 4
LINK_REFILL_DELAY_S: Final = 0.3
"""After a link was taken from the pool: the create it is for has the processor first."""
LINK_MAKE_TIMEOUT_S: Final = 20.0
CONTROL_MESSAGE_BYTES_MAX: Final = 131_072
NETWORK_BYTES_MAX: Final = 65_536
"""Of a `network=` as JSON."""
NETWORK_RULES_MAX: Final = 500
NETWORK_RULE_CHARACTERS_MAX: Final = 1_024
NETWORK_REWRITES_MAX: Final = 100
NETWORK_CREDENTIALS_MAX: Final = 100
FLOOR_BYTES_MAX: Final = 32_768
PACKAGES_KEPT_S: Final = 3_600.0
"""How long it is not asked again which registries the host's package tools use."""
PACKAGE_TOOL_TIMEOUT_S: Final = 60.0
PACKAGE_REQUEST_TIMEOUT_S: Final = 20.0
PACKAGE_ANSWER_BYTES_MAX: Final = 16_777_216
PATH_READ_CHARACTERS_MAX: Final = 8_192
"""Of a request's path that has escapes or the like, where a rule looks at paths; longer ones match no allow."""
FLOWS_PER_SANDBOX_MAX: Final = 1_024
FLOWS_MAX: Final = 32_768
"""Of all sandboxes of a gateway; when half of them are taken, a sandbox has FLOWS_PER_SANDBOX_CROWDED at most."""
FLOWS_PER_SANDBOX_CROWDED: Final = 128
FIRST_BYTES_S: Final = 10.0
"""How long a connection may take to say what it is: TLS, HTTP or neither."""
DENIED_FIRST_BYTES_S: Final = 3.0
"""The same for one that is denied anyway: it is only asked so that it can be answered in its own protocol."""
LAST_WORDS_S: Final = 2.0
FLOW_IDLE_S: Final = 3_600.0
HALF_CLOSED_IDLE_S: Final = 300.0
SPLICE_BUFFER_BYTES: Final = 262_144
SPLICE_BACKLOG_BYTES: Final = 4_194_304
"""Of what all flows of a sandbox have read and not yet written; past it each reads SPLICE_SMALL_BYTES at a time."""
SPLICE_SMALL_BYTES: Final = 2_048
DNS_TTL_S: Final = 60
RESOLVER_THREADS: Final = 64
RESOLVING_PER_SANDBOX_MAX: Final = 8
RESOLVE_TIMEOUT_S: Final = 10.0
RESOLVED_KEEP_S: Final = 30.0
RESOLVED_NOT_KEEP_S: Final = 5.0
DIAL_TIMEOUT_S: Final = 15.0
DIAL_STAGGER_S: Final = 0.25
DIAL_ADDRESSES_MAX: Final = 8
AUDIT_RECORDS_PER_S: Final = 50
"""Sustained, of one sandbox, after a burst of AUDIT_BURST; what is more is summed up."""
AUDIT_BURST: Final = 2_000
AUDIT_BYTES_MAX: Final = 33_554_432
AUDITS_BYTES_MAX: Final = 2_147_483_648
"""Of all sandboxes of a node that have ended, together; the oldest go first."""
CAPTURE_BYTES_MAX: Final = 268_435_456
CAPTURE_BYTES_DEFAULT: Final = 67_108_864
CAPTURE_BYTES_MIN: Final = 65_536
CAPTURES_KEPT_MAX: Final = 64
"""Of one node, those under way and those of sandboxes that have ended; these go first, of the project that has most."""
CAPTURES_PER_PROJECT_MAX: Final = 16
"""Of them, of one project."""
AUDIT_RECORDS_MAX: Final = 10_000
"""In one answer."""
WORKER_IDLE_EXIT_S: Final = 60.0
"""A worker of the barrier without a server and without a sandbox leaves after this."""
WORKER_START_TIMEOUT_S: Final = 30.0
WORKER_REQUEST_TIMEOUT_S: Final = 60.0
"""A worker that has not answered in this time hangs, and is replaced."""
WORKER_FILES_MAX: Final = 524_288
WORKER_THREADS_MAX: Final = 256
WORKER_LOG_BYTES_MAX: Final = 4_194_304
SECRET_BYTES_MAX: Final = 16_384
SANDBOX_SECRETS_BYTES_MAX: Final = 49_152
"""Of all values one sandbox's bindings name, as JSON: they travel in one control message, beside its policy."""
PROTECTED_REPORTED_MAX: Final = 1_000
"""Paths that a download names as left out; those past it are counted."""
PROTECT_PATHS_MAX: Final = 64
"""Of one sandbox's `protect=`."""
PROTECT_BYTES_MAX: Final = 1 << 30
"""Of what lies at those paths, together."""
PROTECT_ENTRIES_MAX: Final = 100_000
SECRETS_MAX: Final = 1_000

# Who calls
KEYS_PER_PROJECT_MAX: Final = 1_000
"""That are good: neither revoked nor expired."""
KEYS_GONE_KEPT: Final = 100
"""Of one project, revoked or expired: those that went last, to be told from keys that never were."""
PROJECTS_MAX: Final = 10_000
INVITES_MAX: Final = 10_000
INVITE_USES_MAX: Final = 10_000
KEY_DAYS_MAX: Final = 3_650
REGISTRATIONS_PER_MINUTE: Final = 10
"""Calls of `POST /v1/register`, good or not, from one address; from all together ten times as many."""
AUDIT_KEPT_S: Final = 365 * 86_400
AUDIT_ROWS_MAX: Final = 2_000_000
AUDIT_REFUSALS_PER_S: Final = 20
"""Of callers without a key, sustained, after a burst of AUDIT_REFUSALS_BURST; what is more is summed up."""
AUDIT_REFUSALS_BURST: Final = 500
IDEMPOTENCY_KEPT_S: Final = 86_400
IDEMPOTENCY_ROWS_MAX: Final = 10_000
"""Of one project: the oldest go first."""
IDEMPOTENCY_ANSWER_BYTES_MAX: Final = 262_144
IDEMPOTENCY_BYTES_MAX: Final = 67_108_864
"""Of one project's answers together, looked at now and then: the oldest go first."""

# Intercept
INTERCEPT_BUILD_TIMEOUT_S: Final = 900.0
INTERCEPT_HEAD_BYTES_MAX: Final = 65_536
"""Of a request's line and headers."""
INTERCEPT_ANSWER_HEAD_BYTES_MAX: Final = 262_144
INTERCEPT_HEADERS_MAX: Final = 256
INTERCEPT_HEAD_TIMEOUT_S: Final = 30.0
"""For a TLS handshake, and for a request's head once its first byte is there."""
INTERCEPT_IDLE_TIMEOUT_S: Final = 600.0
INTERCEPT_PIPELINED_BYTES_MAX: Final = 65_536
"""What a guest may send ahead while its last request is not answered."""
INTERCEPT_REFUSED_AHEAD_MAX: Final = 8
"""Requests in one piece of a guest's that are refused one after another; then its connection ends."""
INTERCEPT_PLACEHOLDER_BODY_BYTES_MAX: Final = 1_048_576
INTERCEPT_SIGNED_BODY_BYTES_MAX: Final = 8_388_608
INTERCEPT_WAITING_BYTES_MAX: Final = 33_554_432
"""Of bodies that wait for a placeholder or a signature, and of messages that wait for their end, in one sandbox."""
INTERCEPT_INFLATED_BYTES_MAX: Final = 16_777_216
"""What one piece of a compressed answer (64 KiB) may come to."""
INTERCEPT_CERTIFICATES_MAX: Final = 1_024
INTERCEPT_AUDIT_QUEUED_MAX: Final = 16_384

# Isolation report: what is shown of a process that may be hostile
ISOLATION_TEXT_CHARACTERS_MAX: Final = 256
"""Of a name, a path, a descriptor's target."""
ISOLATION_READ_BYTES_MAX: Final = 1_048_576
"""Of one file of /proc."""
ISOLATION_DESCRIPTORS_MAX: Final = 1_024
ISOLATION_THREADS_MAX: Final = 256
ISOLATION_MOUNTS_MAX: Final = 128
ISOLATION_ENTRIES_MAX: Final = 512
"""Of what lies in its root."""
ISOLATION_DEPTH_MAX: Final = 8
ISOLATION_EXECUTABLE_BYTES_MAX: Final = 268_435_456
ISOLATION_TIMEOUT_S: Final = 30.0
