"""What Cloud Hypervisor 53 accepts of what we ask: its API's description, written down anew for those requests.

Only the standard library, and no more than the driver sends: a field that is not here is refused, though the real one
would pass over it (its parser takes unknown fields), so that a misspelt one is found. `compare` holds it against the
real description (`tests/unit/vmm/test_cloud_hypervisor_pure.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

INTEGER, STRING, BOOLEAN = {"type": "integer"}, {"type": "string"}, {"type": "boolean"}


def _array(items: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": name}


def _object(required: str = "", **properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": required.split(), "properties": properties}


SCHEMAS: dict[str, dict[str, Any]] = {
    "VmConfig": _object(
        "payload",
        cpus=_ref("CpusConfig"),
        memory=_ref("MemoryConfig"),
        payload=_ref("PayloadConfig"),
        disks=_array(_ref("DiskConfig")),
        net=_array(_ref("NetConfig")),
        rng=_ref("RngConfig"),
        serial=_ref("SerialConfig"),
        console=_ref("ConsoleConfig"),
        vsock=_ref("VsockConfig"),
        landlock_enable=BOOLEAN,
        landlock_rules=_array(_ref("LandlockConfig")),
    ),
    "CpusConfig": _object(
        "boot_vcpus max_vcpus",
        boot_vcpus={"type": "integer", "minimum": 1},
        max_vcpus={"type": "integer", "minimum": 1},
        nested=BOOLEAN,
        core_scheduling=_ref("CoreSchedulingMode"),
    ),
    "CoreSchedulingMode": {"type": "string", "enum": ["Vm", "Vcpu", "Off"]},
    "MemoryConfig": _object("size", size=INTEGER, thp=BOOLEAN, zones=_array(_ref("MemoryZoneConfig"))),
    "MemoryZoneConfig": _object("id size", id=STRING, size=INTEGER, file=STRING, shared=BOOLEAN),
    "PayloadConfig": _object(kernel=STRING, cmdline=STRING, initramfs=STRING),
    "DiskConfig": _object(
        path=STRING,
        readonly=BOOLEAN,
        id=STRING,
        serial=STRING,
        backing_files=BOOLEAN,
        sparse=BOOLEAN,
        image_type=_ref("ImageType"),
    ),
    "ImageType": {"type": "string", "enum": ["FixedVhd", "Qcow2", "Raw", "Vhdx", "Unknown"]},
    "NetConfig": _object(
        mac=STRING,
        num_queues=INTEGER,
        id=STRING,
        fds=_array(INTEGER),
        offload_tso=BOOLEAN,
        offload_ufo=BOOLEAN,
        offload_csum=BOOLEAN,
    ),
    "RngConfig": _object("src", src=STRING),
    "SerialConfig": _object("mode", mode=_ref("ConsoleMode")),
    "ConsoleConfig": _object("mode", mode=_ref("ConsoleMode")),
    "ConsoleMode": {"type": "string", "enum": ["Off", "Pty", "Tty", "File", "Socket", "Null"]},
    "VsockConfig": _object("cid socket", id=STRING, cid={"type": "integer", "minimum": 3}, socket=STRING),
    "LandlockConfig": _object("path access", path=STRING, access=STRING),
    "VmSnapshotConfig": _object(destination_url=STRING),
    "RestoreConfig": _object(
        "source_url",
        source_url=STRING,
        memory_restore_mode=_ref("MemoryRestoreMode"),
        net_fds=_array(_ref("RestoredNetConfig")),
    ),
    "RestoredNetConfig": _object("id num_fds", id=STRING, num_fds=INTEGER),
    "MemoryRestoreMode": {"type": "string", "enum": ["Copy", "OnDemand"]},
    "VmResizeDisk": _object(id=STRING, desired_size=INTEGER),
}

ENDPOINTS: dict[str, tuple[str, str | None]] = {
    "vmm.ping": ("GET", None),
    "vm.info": ("GET", None),
    "vm.create": ("PUT", "VmConfig"),
    "vm.boot": ("PUT", None),
    "vm.pause": ("PUT", None),
    "vm.resume": ("PUT", None),
    "vm.add-net": ("PUT", "NetConfig"),
    "vm.snapshot": ("PUT", "VmSnapshotConfig"),
    "vm.restore": ("PUT", "RestoreConfig"),
    "vm.resize-disk": ("PUT", "VmResizeDisk"),
    "vmm.shutdown": ("PUT", None),
}
"""Method and schema of the body."""

UNDESCRIBED = {
    # Descriptors travel beside the request (SCM_RIGHTS), and so does what is said of them: it is in the source alone
    # (vmm/src/vm_config.rs, vmm/src/config.rs).
    ("NetConfig", "fds"),
    ("RestoreConfig", "net_fds"),
}
UNDESCRIBED_SCHEMAS = {"RestoredNetConfig"}


def problems(name: str, value: Any, where: str = "") -> list[str]:
    """Why `value` is not what schema `name` describes; nothing when it is."""
    return _problems(SCHEMAS[name], value, where or name)


def _problems(schema: Mapping[str, Any], value: Any, where: str) -> list[str]:
    if "$ref" in schema:
        return _problems(SCHEMAS[schema["$ref"]], value, where)
    kind = schema["type"]
    fits = {
        "object": isinstance(value, dict),
        "array": isinstance(value, list),
        "string": isinstance(value, str),
        "boolean": isinstance(value, bool),
        "integer": isinstance(value, int) and not isinstance(value, bool),
    }[kind]
    if not fits:
        return [f"{where}: {value!r} is no {kind}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{where}: {value!r} is none of {schema['enum']}"]
    if "minimum" in schema and value < schema["minimum"]:
        return [f"{where}: {value!r} is below {schema['minimum']}"]
    found: list[str] = []
    if kind == "array":
        for number, item in enumerate(value):
            found += _problems(schema["items"], item, f"{where}[{number}]")
    if kind == "object":
        found += [f"{where}: {name} is missing" for name in schema["required"] if name not in value]
        for name, item in value.items():
            part = schema["properties"].get(name)
            if part is None:
                found.append(f"{where}: there is no field {name}")
            else:
                found += _problems(part, item, f"{where}.{name}")
    return found


def compare(description: Mapping[str, Any]) -> list[str]:
    """What of the above the real description (as read from its YAML) says otherwise."""
    theirs = description["components"]["schemas"]
    found: list[str] = []
    for endpoint, (method, body) in ENDPOINTS.items():
        act = description["paths"].get(f"/{endpoint}", {}).get(method.lower())
        if act is None:
            found.append(f"there is no {method} /{endpoint}")
            continue
        content = act.get("requestBody", {}).get("content", {}).get("application/json", {})
        described = content.get("schema", {}).get("$ref", "").rpartition("/")[2] or None
        if described != body:
            found.append(f"/{endpoint}: the body is {described}, not {body}")
    for name, schema in SCHEMAS.items():
        if name in UNDESCRIBED_SCHEMAS:
            continue
        if name not in theirs:
            found.append(f"there is no schema {name}")
            continue
        their = theirs[name]
        if missing := set(their.get("required", [])) - set(schema.get("required", [])):
            found.append(f"{name}: {sorted(missing)} are required")
        if schema.get("enum") is not None and schema["enum"] != their.get("enum"):
            found.append(f"{name}: {their.get('enum')}, not {schema['enum']}")
        for field, part in schema.get("properties", {}).items():
            described = their.get("properties", {}).get(field)
            if described is None:
                if (name, field) not in UNDESCRIBED:
                    found.append(f"{name}: there is no field {field}")
                continue
            if (name, field) in UNDESCRIBED:
                found.append(f"{name}.{field}: it is described now")
            if _shape(part) != _shape(described):
                found.append(f"{name}.{field}: it is {_shape(described)}, not {_shape(part)}")
    return found


def _shape(part: Mapping[str, Any]) -> str:
    if "$ref" in part:
        return str(part["$ref"]).rpartition("/")[2]
    if part["type"] == "array":
        return f"array of {_shape(part['items'])}"
    return str(part["type"])


def read_yaml(text: str) -> Any:
    """The subset of YAML that the description is written in: maps, lists, plain and quoted words, folded text."""
    lines = [
        line.rstrip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")
    ]
    value, at = _block(lines, 0, 0)
    assert at == len(lines), lines[at]
    return value


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _block(lines: list[str], at: int, indent: int) -> tuple[Any, int]:
    """The map or list that begins at line `at`, each of whose parts has that indentation."""
    if lines[at].lstrip().startswith("- "):
        items = []
        while at < len(lines) and _indent(lines[at]) == indent and lines[at].lstrip().startswith("- "):
            rest = lines[at].lstrip()[2:]
            if ":" in rest and not rest.startswith(("[", '"', "'")):
                lines[at] = " " * (indent + 2) + rest
                item, at = _block(lines, at, indent + 2)
            else:
                item, at = _scalar(rest), at + 1
            items.append(item)
        return items, at
    found: dict[Any, Any] = {}
    while at < len(lines) and _indent(lines[at]) == indent and not lines[at].lstrip().startswith("- "):
        key, _, rest = lines[at].strip().partition(":")
        rest, key = rest.strip(), str(_scalar(key))
        at += 1
        if rest in (">", "|"):
            while at < len(lines) and _indent(lines[at]) > indent:
                at += 1
            found[key] = ""
        elif rest:
            # Plain text may go on in lines that are indented further.
            while at < len(lines) and _indent(lines[at]) > indent:
                at += 1
            found[key] = _scalar(rest)
        elif at < len(lines) and (
            _indent(lines[at]) > indent
            or (_indent(lines[at]) == indent and lines[at].lstrip().startswith("- "))
        ):
            if key == "description" and not lines[at].rstrip().endswith(":") and ": " not in lines[at]:
                while at < len(lines) and _indent(lines[at]) > indent:
                    at += 1
                found[key] = ""
            else:
                found[key], at = _block(lines, at, _indent(lines[at]))
        else:
            found[key] = None
    return found, at


def _scalar(text: str) -> Any:
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        return [_scalar(part) for part in text[1:-1].split(",")]
    if text[:1] in ("'", '"'):
        return text[1:-1]
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.lstrip("-").isdigit() else text
