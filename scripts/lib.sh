# Sourced by the scripts: strict mode, the checkout's root, what "missing" means.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
CACHE=${LLM4AGENTS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/llm4agents}
PY=$ROOT/.venv/bin/python
export PYTHONDONTWRITEBYTECODE=1

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }
