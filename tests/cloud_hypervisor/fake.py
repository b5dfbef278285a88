#!/usr/bin/env python3
"""A Cloud Hypervisor for tests where KVM runs nothing: its command line, its API, its files, and no processor.

Run as a program, in the real one's jail. What it takes is checked against `schema`; what it answers, in which order it
lets itself be asked, what it writes and what it does with a memory file's holes is as seen of the real 53.0 (inside a
nested guest). Its guest is the real agent behind a vsock socket that speaks the real CONNECT; and for memory that
changes it writes, on page MARK of the guest's memory, how often the agent was connected to.

Standard library only, and little of that: it is copied into the jail file by file.
"""

# ruff: noqa: T201  (it is a program)

import array
import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import selectors
import signal
import socket
import stat
import struct
import sys
import threading

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import schema

VERSION = "53.0.0"
AGENT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "llm4agents-agent")
MARK = 256
"""The page, in each piece of the memory, that says how often the agent was connected to."""
LOW_BYTES, HIGH_AT = 3 << 30, 4 << 30
"""Memory beyond that lies above the hole for devices."""
PAGE = 4096
FIRST_PORT = 1 << 30
TUNGETIFF, IFF_TAP, IFF_VNET_HDR = 0x800454D2, 0x0002, 0x4000
HEAD_BYTES_MAX, BODY_BYTES_MAX = 8192, 51_200
"""The real one's HTTP library takes no longer ones."""


class Refused(Exception):
    """An error as the API answers it: a status and causes, the nearest last."""

    def __init__(self, status, *causes):
        super().__init__(causes)
        self.status, self.causes = status, list(causes)


def refused(doing, *causes):
    return Refused(500, "Error from API", doing, *causes)


class Vm:
    """A machine that was created: Created, Running or Paused."""

    def __init__(self, config):
        self.config, self.state = config, "Created"
        self.disks = {}
        self.nic = self.memory = self.agent = self.vsock = None
        self.pieces, self.piece_fds = [], []
        self.stale = False
        self.connected = 0

    # -- made from its configuration

    def open_devices(self, fds):
        """Disks with their locks, the NIC, the source of entropy, the vsock socket: what is not there is an error."""
        for disk in self.config.get("disks", []):
            flags = os.O_RDONLY if disk.get("readonly") else os.O_RDWR
            try:
                fd = os.open(disk["path"], flags)
            except OSError as error:
                why = f"Failed to open {disk['path']}: {os.strerror(error.errno)}"
                raise refused("The VM could not boot", why) from None
            kind = fcntl.F_RDLCK if disk.get("readonly") else fcntl.F_WRLCK
            try:
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("=hhxxxxqqixxxx", kind, os.SEEK_SET, 0, 0, 0))
            except OSError:
                why = "Error locking disk images: Another instance likely holds a lock"
                raise refused("The VM could not boot", why) from None
            self.disks[disk["id"]] = fd
        for net in self.config.get("net", []):
            if len(fds) != 1:
                raise refused("The VM could not boot", "The network device has no descriptor")
            self.nic = fds.pop()
            flags = struct.unpack("16sH22x", fcntl.ioctl(self.nic, TUNGETIFF, bytes(40)))[1]
            if flags & (IFF_TAP | IFF_VNET_HDR) != IFF_TAP | IFF_VNET_HDR:
                raise refused("The VM could not boot", f"{net['id']} is no tap with vnet_hdr")
        os.close(os.open(self.config["rng"]["src"], os.O_RDONLY))
        self.listen()

    def map_memory(self, mappings=None):
        """`mappings`: where in the zone's file each piece lies, as a snapshot has it."""
        zones = self.config["memory"].get("zones", [])
        if self.config["memory"]["size"] != 0 or len(zones) != 1:
            raise refused("The VM could not boot", "User defined memory regions must be provided")
        zone = zones[0]
        if "file" not in zone and not zone.get("shared"):
            raise refused("The VM could not boot", "this fake has no anonymous memory")
        kind = mmap.MAP_SHARED if zone.get("shared") else mmap.MAP_PRIVATE
        if mappings is None:
            # Without a file each piece is one of its own, and begins it.
            offset = LOW_BYTES if "file" in zone else 0
            mappings = [{"gpa": 0, "size": min(zone["size"], LOW_BYTES), "file_offset": 0}]
            if zone["size"] > LOW_BYTES:
                high = {"gpa": HIGH_AT, "size": zone["size"] - LOW_BYTES, "file_offset": offset}
                mappings.append(high)
        for each in mappings:
            if "file" in zone:
                fd = os.open(zone["file"], os.O_RDWR if zone.get("shared") else os.O_RDONLY)
                if os.fstat(fd).st_size < each["file_offset"] + each["size"]:
                    raise refused("The VM could not boot", "Failed to map memory")
            else:
                fd = os.memfd_create("ch_ram")
                os.ftruncate(fd, each["size"])
            rights = mmap.PROT_READ | mmap.PROT_WRITE
            self.pieces.append(mmap.mmap(fd, each["size"], kind, rights, offset=each["file_offset"]))
            self.piece_fds.append(fd)
        self.mappings, self.memory, self.memory_shared = mappings, self.pieces[0], kind == mmap.MAP_SHARED

    def ranges(self):
        return [{"gpa": each["gpa"], "length": each["size"]} for each in self.mappings]

    def load_kernel(self):
        payload = self.config["payload"]
        try:
            with open(payload["kernel"], "rb") as file:
                head = file.read(4)
        except OSError as error:
            raise refused(
                "The VM could not boot", "Cannot open kernel file", os.strerror(error.errno)
            ) from None
        if head != b"\x7fELF":
            raise refused("The VM could not boot", "Cannot load the kernel into memory")
        with open(payload["initramfs"], "rb") as file:
            self.memory[: PAGE * 4] = file.read(PAGE * 4).ljust(PAGE * 4, b"\0")
        print("Linux version (of a fake):", payload["cmdline"], flush=True)

    # -- the guest

    def listen(self):
        self.vsock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.vsock.bind(self.config["vsock"]["socket"])
        self.vsock.listen(16)

    def run_guest(self):
        """Its agent, the real one, which serves a socket of ours; and who brings the host's connections to it."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"\0agent-{os.getpid()}")
        listener.listen(4)
        self.agent_address = listener.getsockname()
        pid = os.fork()
        if pid == 0:
            for number in (signal.SIGTERM, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            fd = os.dup2(listener.fileno(), 900)
            os.set_inheritable(fd, True)
            os.execv(AGENT, [AGENT, "--serve", str(fd)])
        listener.close()
        self.agent = pid
        threading.Thread(target=self.muxer, daemon=True).start()
        threading.Thread(target=self.watch, daemon=True).start()

    def watch(self):
        _, status = os.waitpid(self.agent, 0)
        # A guest that is off ends its monitor.
        os._exit(0 if status == 0 else 1)

    def muxer(self):
        port = FIRST_PORT
        while True:
            host, _ = self.vsock.accept()
            line = b""
            while not line.endswith(b"\n") and len(line) < 32:
                part = host.recv(1)
                if not part:
                    break
                line += part
            words = line.lower().split()
            if len(words) != 2 or words[0] != b"connect" or words[1] != b"1024" or self.stale:
                # Another port: nobody listens. Stale: the guest still has a connection of that port.
                self.stale = False
                port += 1
                host.close()
                continue
            guest = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            guest.connect(self.agent_address)
            self.connected += 1
            for piece in self.pieces:
                piece[MARK * PAGE : MARK * PAGE + 8] = struct.pack("<Q", self.connected)
            host.sendall(b"OK %d\n" % port)
            port += 1
            for pair in ((host, guest), (guest, host)):
                threading.Thread(target=relay, args=pair, daemon=True).start()

    def stand_still(self, still):
        os.kill(self.agent, signal.SIGSTOP if still else signal.SIGCONT)


def relay(source, target):
    try:
        while data := source.recv(65536):
            target.sendall(data)
    except OSError:
        pass
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


class Api:
    def __init__(self):
        self.vm = None

    def answer(self, method, path, body, fds):
        """Status and JSON (None: no body) of one request."""
        endpoint = path.removeprefix("/api/v1/")
        if endpoint not in schema.ENDPOINTS or not path.startswith("/api/v1/"):
            raise Refused(404, "Not Found")
        wanted, name = schema.ENDPOINTS[endpoint]
        if method != wanted or (body is None) != (name is None):
            raise Refused(400, "Bad Request")
        if name is not None and (found := schema.problems(name, body)):
            raise Refused(400, "Failed to deserialize JSON", *found)
        act = getattr(self, endpoint.replace(".", "_").replace("-", "_"))
        found = act(fds) if body is None else act(body, fds)
        return (204, None) if found is None else (200, found)

    def vmm_ping(self, fds):
        return {"build_version": f"v{VERSION}", "version": VERSION, "pid": os.getpid(), "features": ["kvm"]}

    def vmm_shutdown(self, fds):
        os._exit(0)

    def vm_info(self, fds):
        if self.vm is None:
            raise Refused(404, "Error from API", "The VM info is not available", "VM is not created")
        size = sum(zone["size"] for zone in self.vm.config["memory"].get("zones", []))
        return {"config": self.vm.config, "state": self.vm.state, "memory_actual_size": size}

    def vm_create(self, config, fds):
        if self.vm is not None:
            raise refused("The VM could not be created", "VM is already created")
        if any(net.get("fds") for net in config.get("net", [])):
            config["net"] = [{name: net[name] for name in net if name != "fds"} for net in config["net"]]
        for rule in config.get("landlock_rules", []):
            if not set(rule["access"]) <= set("rw") or not rule["access"]:
                raise refused("The VM could not be created", "Invalid Landlock access")
        self.vm = Vm(config)

    def vm_add_net(self, net, fds):
        if self.vm is None:
            doing = "The network device could not be added to the VM"
            raise Refused(404, "Error from API", doing, "VM is not created")
        if self.vm.state != "Created":
            raise refused("The network device could not be added to the VM", "this fake has no hot plug")
        self.vm.config.setdefault("net", []).append({**net, "fds": [-1]} if fds else net)
        self.vm.pending = fds[:]
        fds.clear()

    def vm_boot(self, fds):
        if self.vm is None:
            raise Refused(404, "Error from API", "The VM could not boot", "VM config is missing")
        if self.vm.state != "Created":
            raise refused("The VM could not boot", "VM is already created")
        self.vm.map_memory()
        self.vm.load_kernel()
        self.vm.open_devices(getattr(self.vm, "pending", []))
        self.vm.run_guest()
        self.vm.state = "Running"

    def running(self, doing):
        if self.vm is None or self.vm.state == "Created":
            raise refused(doing, "VM is not running")
        return self.vm

    def vm_pause(self, fds):
        vm = self.running("The VM could not be paused")
        if vm.state == "Paused":
            raise refused(
                "The VM could not be paused",
                "Cannot pause VM",
                "Failed to pause migratable component",
                "Invalid transition: InvalidStateTransition(Paused, Paused)",
            )
        vm.stand_still(True)
        vm.state = "Paused"

    def vm_resume(self, fds):
        vm = self.running("The VM could not resume")
        if vm.state == "Running":
            raise refused(
                "The VM could not resume",
                "Cannot resume VM",
                "Failed to resume migratable component",
                "Invalid transition: InvalidStateTransition(Running, Running)",
            )
        if vm.agent is None:
            vm.run_guest()
        vm.stand_still(False)
        vm.state = "Running"

    def vm_resize_disk(self, wanted, fds):
        vm = self.running("The disk could not be resized")
        if vm.state != "Running":
            # The real one waits for threads that stand still already, for ever.
            signal.pause()
        fd = vm.disks.get(wanted["id"])
        if fd is None:
            raise refused("The disk could not be resized", f"Unknown device id: {wanted['id']}")
        os.ftruncate(fd, wanted["desired_size"])

    def vm_snapshot(self, wanted, fds):
        doing = "The VM could not be snapshotted"
        vm = self.running(doing)
        if vm.state != "Paused":
            raise refused(
                doing,
                "Cannot snapshot VM",
                "Failed to snapshot migratable component",
                "Trying to snapshot while VM is running",
            )
        directory = wanted["destination_url"].removeprefix("file://")
        manager = json.dumps({"memory_ranges": {"data": vm.ranges()}, "guest_ram_mappings": vm.mappings})
        state = {
            "snapshots": {"memory-manager": {"snapshots": {}, "snapshot_data": {"state": manager}}},
            "snapshot_data": {"state": json.dumps({"fake": shape(vm.config)})},
        }
        for name, body, what in (("config.json", vm.config, "config"), ("state.json", state, "state")):
            fd = create_new(directory, name, doing, f"Error creating VM {what} snapshot file")
            os.write(fd, json.dumps(body).encode())
            os.close(fd)
        out = create_new(directory, "memory-ranges", doing, "Error creating memory snapshot file")
        os.ftruncate(out, sum(len(piece) for piece in vm.pieces))
        # Of a memory of its own the holes stay holes; a private mapping is written whole.
        begin = 0
        for piece, fd in zip(vm.pieces, vm.piece_fds, strict=True):
            at = 0
            while at < len(piece):
                if vm.memory_shared:
                    try:
                        at = os.lseek(fd, at, os.SEEK_DATA)
                    except OSError:
                        break
                os.pwrite(out, piece[at : at + 65536], begin + at)
                at += 65536
            begin += len(piece)
        os.close(out)

    def vm_restore(self, wanted, fds):
        doing = "The VM could not be restored"
        if self.vm is not None:
            raise refused(doing, "VM is already created")
        directory = wanted["source_url"].removeprefix("file://")
        try:
            with open(f"{directory}/config.json") as file:
                config = json.load(file)
            with open(f"{directory}/state.json") as file:
                state = json.load(file)
            manager = json.loads(state["snapshots"]["memory-manager"]["snapshot_data"]["state"])
            frozen = json.loads(state["snapshot_data"]["state"])["fake"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise refused(doing, "Cannot restore VM", repr(error)) from None
        if found := schema.problems("VmConfig", config):
            raise refused(doing, "Cannot restore VM", *found)
        told = {net["id"]: net["num_fds"] for net in wanted.get("net_fds", [])}
        if len(fds) != sum(told.values()):
            raise Refused(400, "Bad Request")
        for net in config.get("net", []):
            if told.get(net["id"]) != len(net.get("fds", [])):
                raise refused(doing, "Error validating config", f"net_fds: {net['id']}")
        if shape(config) != frozen:
            raise refused(doing, "Cannot restore VM", f"a snapshot of {frozen}, restored as {shape(config)}")
        vm = Vm(config)
        vm.map_memory(manager["guest_ram_mappings"])
        try:
            fill(vm, f"{directory}/memory-ranges", manager["memory_ranges"]["data"])
        except OSError as error:
            raise refused(doing, "Cannot open memory snapshot", os.strerror(error.errno)) from None
        vm.open_devices(fds[:])
        fds.clear()
        vm.state, vm.stale = "Paused", True
        vm.connected = struct.unpack("<Q", vm.memory[MARK * PAGE : MARK * PAGE + 8])[0]
        self.vm = vm


def shape(config):
    """What a snapshot and the machine it is loaded into must have in common."""
    return {
        "cpus": config["cpus"]["boot_vcpus"],
        "nested": config["cpus"].get("nested", True),
        "memory": [[zone["id"], zone["size"]] for zone in config["memory"].get("zones", [])],
        "devices": [disk["id"] for disk in config.get("disks", [])]
        + [net["id"] for net in config.get("net", [])]
        + [config["vsock"]["id"]],
    }


def fill(vm, path, ranges):
    """The data of the memory file to its places; its holes are left alone, since there memory is as it was mapped."""
    fd = os.open(path, os.O_RDONLY)
    cursor = 0
    for each, piece in zip(ranges, vm.pieces, strict=True):
        end, at = cursor + each["length"], cursor
        while at < end:
            try:
                at = os.lseek(fd, at, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                break
            if at >= end:
                break
            stop = min(os.lseek(fd, at, os.SEEK_HOLE), end)
            place = at - cursor
            piece[place : place + stop - at] = os.pread(fd, stop - at, at)
            at = stop
        cursor = end
    os.close(fd)


def create_new(directory, name, doing, words):
    try:
        return os.open(f"{directory}/{name}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise refused(
            doing,
            "Cannot send VM snapshot",
            "Failed to send migratable component snapshot",
            f'{words} "{directory}/{name}"',
            f"{os.strerror(error.errno)} (os error {error.errno})",
        ) from None


# -- HTTP ---------------------------------------------------------------------------------------------------


class Connection:
    def __init__(self, sock):
        self.sock, self.data, self.fds = sock, b"", []

    def read(self):
        """Take in what came; False at the end."""
        space = socket.CMSG_SPACE(64 * 4)
        data, ancillary, _, _ = self.sock.recvmsg(65536, space)
        for level, kind, raw in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                numbers = array.array("i")
                numbers.frombytes(raw[: len(raw) - len(raw) % 4])
                self.fds += numbers
        self.data += data
        return bool(data)

    def requests(self):
        while b"\r\n\r\n" in self.data:
            head, _, rest = self.data.partition(b"\r\n\r\n")
            lines = head.decode("ascii").split("\r\n")
            method, path, version = lines[0].split(" ")
            assert version == "HTTP/1.1" and len(head) <= HEAD_BYTES_MAX, lines[0]
            headers = {line.partition(":")[0].lower(): line.partition(":")[2].strip() for line in lines[1:]}
            length = int(headers.get("content-length", "0"))
            assert length <= BODY_BYTES_MAX, length
            if len(rest) < length:
                return
            body, self.data = rest[:length], rest[length:]
            if length and headers.get("content-type") != "application/json":
                raise AssertionError(headers)
            given, self.fds = self.fds, []
            yield method, path, json.loads(body) if length else None, given

    def send(self, status, body):
        data = b"" if body is None else json.dumps(body).encode()
        head = f"HTTP/1.1 {status} \r\nServer: Cloud Hypervisor API\r\nConnection: keep-alive\r\n"
        if body is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        self.sock.sendall(head.encode() + b"\r\n" + data)


def serve(listener):
    api = Api()
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ, None)
    while True:
        for key, _ in selector.select():
            if key.data is None:
                sock, _ = listener.accept()
                selector.register(sock, selectors.EVENT_READ, Connection(sock))
                continue
            connection = key.data
            try:
                alive = connection.read()
            except OSError:
                alive = False
            if not alive:
                selector.unregister(connection.sock)
                connection.sock.close()
                continue
            for method, path, body, fds in connection.requests():
                try:
                    status, found = api.answer(method, path, body, fds)
                except Refused as error:
                    status, found = error.status, error.causes
                for fd in fds:
                    os.close(fd)
                connection.send(status, found)


def main(argv):
    if argv == ["--version"]:
        print(f"cloud-hypervisor v{VERSION}")
        return 0
    if "--kernel" in argv:
        # The probe: a byte on the serial line is all it wants.
        print("K", end="", flush=True)
        return 0
    known = {"--api-socket": None, "--seccomp": ("true", "false", "log", "errno")}
    options = dict(zip(argv[::2], argv[1::2], strict=False))
    for name, value in options.items():
        if name not in known or (known[name] is not None and value not in known[name]):
            print(f"error: unexpected argument '{name}' found", file=sys.stderr)
            return 2
    if "--api-socket" not in options or len(argv) % 2:
        print("error: the following required arguments were not provided", file=sys.stderr)
        return 2
    kind, _, value = options["--api-socket"].partition("=")
    if kind == "fd":
        listener = socket.socket(fileno=int(value))
        assert stat.S_ISSOCK(os.fstat(int(value)).st_mode)
    else:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(value or kind)
        listener.listen(10)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    # The first thread of the real one waits for the others and has no filter of its own; each of those puts one on.
    filtered = options.get("--seccomp", "true") == "true"
    thread = threading.Thread(target=lambda: (filtered and put_on_filter(), serve(listener)))
    thread.start()
    thread.join()
    return 0


def put_on_filter():
    """One that allows everything: what it would refuse is the real one's to know."""
    one = struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000)  # return SECCOMP_RET_ALLOW
    code = ctypes.create_string_buffer(one, len(one))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 1, ctypes.addressof(code)))
    set_seccomp, mode_filter = 22, 2
    if ctypes.CDLL(None, use_errno=True).prctl(set_seccomp, mode_filter, program, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no filter of its own")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
