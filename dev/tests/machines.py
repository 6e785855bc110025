"""Machines made of Linux namespaces: each has a network, a host name, processes and an sshd of its own, and a cable to
the others that can be pulled.

Nothing outlives the test. However it ends, its end of a pipe closes; then the machine's first process ends, and the
kernel kills all processes of that machine and removes its network.
"""
import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import time

TOOLS = ("ip", "nsenter", "ssh", "ssh-keygen", "sshd", "unshare")
PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"

# The first process of each machine, which ends when its input ends.
BOOT = """
set -eu
hostname {name}
ip link set lo up
mount --bind {folder}/hosts /etc/hosts
mount -t tmpfs tmpfs /run
mkdir -p /run/sshd
echo up
read -r _
ip link set eth0 up 2> /dev/null || true
{sshd}
while read -r _; do :; done
"""

SSHD = """
Port 22
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100
"""

SSH = """
Host *
    IdentityFile {folder}/key
    UserKnownHostsFile {folder}/known_hosts
    StrictHostKeyChecking yes
    IdentitiesOnly yes
    BatchMode yes
    LogLevel ERROR
"""


def missing():
    """The reason why machines cannot be made here, or None."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    absent = [tool for tool in TOOLS if not shutil.which(tool, path=PATH)]
    if absent:
        return f"not installed: {', '.join(absent)} (scripts/setup.sh --test)"
    if subprocess.run(["unshare", "--net", "--uts", "--pid", "--mount", "--fork", "true"],
                      stderr=subprocess.DEVNULL).returncode:
        return "the system does not allow new namespaces"
    return None


def end_with_parent():
    """Called in a child before exec: has it killed when this process dies."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Machine:
    def __init__(self, network, name, address, first):
        self.network, self.name, self.address, self.first = network, name, address, first
        children = f"/proc/{first.pid}/task/{first.pid}/children"
        self.pid = int(open(children).read())      # id of the first process inside, in this namespace

    def inside(self, words):
        return ["nsenter", "-t", str(self.pid), "--net", "--uts", "--pid", "--mount", f"--wdns={os.getcwd()}",
                *map(str, words)]

    def run(self, *words, **how):
        return subprocess.run(self.inside(words), env=self.network.env, check=True, capture_output=True, text=True,
                              timeout=60, **how).stdout

    def start(self, *words, env=None, **how):
        return subprocess.Popen(self.inside(words), env=self.network.env | (env or {}), stdin=subprocess.DEVNULL,
                                text=True, preexec_fn=end_with_parent, **how)

    def cable(self, plugged):
        """Plugs in the machine's network cable, or pulls it."""
        self.network.switch.run("ip", "link", "set", self.name, "up" if plugged else "down")

    def reaches(self, other):
        """True if the other machine's sshd answers. The kernel gives up on an unreachable neighbor for a while."""
        probe = subprocess.run(self.inside(["timeout", "2", "bash", "-c", f"exec 3<> /dev/tcp/{other.name}/22"]),
                               env=self.network.env, stderr=subprocess.DEVNULL)
        return probe.returncode == 0

    def processes(self, name):
        """The ids, inside the machine, of its processes with that name, without zombies."""
        lines = self.run("ps", "-e", "-o", "pid=,stat=,comm=").splitlines()
        return [int(line.split()[0])
                for line in lines if line.split()[2] == name and not line.split()[1].startswith("Z")]

    def kill(self, *names):
        """Kills its processes with these names by SIGKILL."""
        for pid in [pid for name in names for pid in self.processes(name)]:
            subprocess.run(self.inside(["kill", "-9", pid]), stderr=subprocess.DEVNULL, env=self.network.env)


class Network:
    """Machines on a switch. Use it in a with statement; `folder` is for keys and configurations."""

    def __init__(self, folder, names):
        self.folder, self.names, self.firsts, self.machines = folder, names, [], []
        self.env = dict(os.environ, PATH=PATH)

    def __enter__(self):
        try:
            self.keys()
            self.switch = self.boot("switch", "")
            self.switch.run("ip", "link", "add", "bridge", "type", "bridge")
            self.switch.run("ip", "link", "set", "bridge", "up")
            self.machines = [self.attach(name, f"10.77.0.{i + 1}") for i, name in enumerate(self.names)]
            for machine in self.machines:
                self.wait_for_ssh(machine)
            return self
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_):
        for first in self.firsts:
            first.stdin.close()
        for first in self.firsts:
            try:
                first.wait(10)
            except subprocess.TimeoutExpired:
                first.kill()
                first.wait()
        self.firsts = []

    def keys(self):
        for name in ("host_key", "key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / name], check=True,
                           env=self.env)
        host = " ".join((self.folder / "host_key.pub").read_text().split()[:2])
        addresses = {name: f"10.77.0.{i + 1}" for i, name in enumerate(self.names)}
        known = "".join(f"{name},{address} {host}\n" for name, address in addresses.items())
        (self.folder / "known_hosts").write_text(known)
        names = "".join(f"{address} {name}\n" for name, address in addresses.items())
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n" + names)
        (self.folder / "ssh_config").write_text(SSH.format(folder=self.folder))
        self.env["OMPI_MCA_plm_rsh_agent"] = f"ssh -F {shlex.quote(str(self.folder / 'ssh_config'))}"

    def boot(self, name, sshd):
        script = BOOT.format(name=name, folder=shlex.quote(str(self.folder)), sshd=sshd)
        first = subprocess.Popen(["unshare", "--net", "--uts", "--pid", "--mount", "--fork", "--kill-child",
                                  "--mount-proc", "bash", "-c", script],
                                 stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self.env,
                                 preexec_fn=end_with_parent)
        self.firsts.append(first)
        assert first.stdout.readline() == "up\n", f"{name} did not start"
        return Machine(self, name, "", first)

    def attach(self, name, address):
        config = self.folder / f"sshd_{name}"
        config.write_text(SSHD.format(folder=self.folder, address=address))
        log = shlex.quote(str(self.folder / f"log_{name}"))
        machine = self.boot(name, f"$(command -v sshd) -f {shlex.quote(str(config))} -D -E {log} &")
        machine.address = address
        # Enters only the switch's network namespace: inside its process namespace, the machine's process would have no
        # id.
        subprocess.run(["nsenter", "-t", str(self.switch.pid), "--net", "ip", "link", "add", name, "type", "veth",
                        "peer", "name", "eth0", "netns", str(machine.pid)], check=True, env=self.env)
        self.switch.run("ip", "link", "set", name, "master", "bridge", "up")
        machine.run("ip", "address", "add", f"{address}/24", "dev", "eth0")
        machine.first.stdin.write("go\n")
        machine.first.stdin.flush()
        return machine

    def wait_for_ssh(self, machine):
        words = ["ssh", "-F", self.folder / "ssh_config", machine.name, "true"]
        for _ in range(100):
            result = subprocess.run(self.machines[0].inside(words), env=self.env, capture_output=True, text=True,
                                    timeout=60)
            if result.returncode == 0:
                return
            time.sleep(0.2)
        log = self.folder / f"log_{machine.name}"
        raise AssertionError(f"ssh to {machine.name}: {result.stderr}{log.read_text() if log.exists() else ''}")
