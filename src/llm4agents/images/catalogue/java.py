"""`java`: OpenJDK, Debian's default release of it."""

from __future__ import annotations

from types import MappingProxyType

from llm4agents.images.catalogue import base
from llm4agents.images.kinds import TemplateSpec, WarmStep, WarmUp

_WARM = """\
cd $(mktemp -d)
cat > Warm.java <<'END'
public class Warm {
    public static void main(String[] words) { System.out.println("warm " + words.length); }
}
END
javac Warm.java
java -Xshare:auto Warm
cd /
rm -r $OLDPWD
"""

JAVA = TemplateSpec(
    name="java",
    description="base with OpenJDK: java, javac, jshell",
    languages=("java",),
    packages=(*base.PACKAGES, "default-jdk-headless"),
    environment=MappingProxyType({**base.ENVIRONMENT, "JAVA_HOME": "/usr/lib/jvm/default-java"}),
    warm_up=WarmUp(steps=(*base.STEPS, WarmStep(("/bin/bash", "-ec", _WARM), timeout_s=300.0))),
    build_bytes=4_000_000_000,
    rootfs_bytes=700_000_000,
)
