# Sourced by the scripts: strict mode, the checkout's root, what "missing" means.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
CACHE=${LLM4AGENTS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/llm4agents}
PY=$ROOT/.venv/bin/python
export PYTHONDONTWRITEBYTECODE=1

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

# A cargo and rustc that run and are new enough, exported as CARGO and RUSTC; fails if there are none. The first on
# PATH may be a rustup proxy without a toolchain, or Debian 12's plain cargo, too old for today's crates.
find_cargo() {
  local cargo rustc version
  for cargo in "${CARGO:-cargo}" /usr/bin/cargo; do
    rustc=${RUSTC:-rustc}
    if [ "$cargo" = /usr/bin/cargo ]; then rustc=/usr/bin/rustc; fi
    version=$("$cargo" --version 2>/dev/null | cut -d' ' -f2) && "$rustc" --version >/dev/null 2>&1 || continue
    [ "$(printf '%s\n' 1.70 "$version" | sort -V | head -1)" = 1.70 ] || continue
    export CARGO=$cargo RUSTC=$rustc
    return 0
  done
  return 1
}
