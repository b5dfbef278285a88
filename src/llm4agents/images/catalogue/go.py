"""`go`: the Go tool chain."""

from __future__ import annotations

from types import MappingProxyType

from llm4agents.images.catalogue import base
from llm4agents.images.kinds import TemplateSpec, WarmStep, WarmUp

# Since 1.20 its library comes as source only: what nearly every program uses is compiled once, before the freeze.
_WARM = """\
cd $(mktemp -d)
cat > main.go <<'END'
package main

import (
	"fmt"
	"os"
	"strings"
)

func main() { fmt.Println(strings.ToUpper("warm"), len(os.Args)) }
END
go mod init warm 2>/dev/null
go build -o warm .
./warm
cd /
rm -r $OLDPWD
"""

GO = TemplateSpec(
    name="go",
    description="base with the Go tool chain; the usual part of its library is compiled already",
    languages=("go",),
    packages=base.PACKAGES,
    wheels="go",
    moves=(("go", "/usr/local/go"),),
    environment=MappingProxyType(
        {
            **base.ENVIRONMENT,
            "PATH": f"{base.HOME}/go/bin:/usr/local/go/bin:{base.ENVIRONMENT['PATH']}",
            "GOPATH": f"{base.HOME}/go",
            "GOCACHE": f"{base.HOME}/.cache/go-build",
            # No C compiler is in here, and no other tool chain is fetched: what is here is what runs.
            "CGO_ENABLED": "0",
            "GOTOOLCHAIN": "local",
            "GOTELEMETRY": "off",
        }
    ),
    warm_up=WarmUp(steps=(*base.STEPS, WarmStep(("/bin/bash", "-ec", _WARM), timeout_s=600.0))),
    build_bytes=3_000_000_000,
    rootfs_bytes=500_000_000,
)
