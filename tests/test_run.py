"""`shardlib run` and `shardlib doctor`: hostfiles, exit codes, logs, signals, restarts."""

import ipaddress
import json
import os
import platform
import re
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from shardlib.cli import main
from shardlib.cli.agent import Logs, culprit, report
from shardlib.cli.doctor import machine
from shardlib.cli.hosts import chosen, parsed
from shardlib.errors import MeshError

ROOT = Path(__file__).parents[1]
FILE = "# two hosts\nworker-0 slots=4\n\nworker-1  slots=2   # smaller\n"


def run(script: str, folder: Path, *options: str, arguments: tuple[str, ...] = (), **more: str) -> tuple[int, str, str]:
    """`shardlib run` of a script, which need not load torch: exit code, standard output and error."""
    path = folder / "script.py"
    path.write_text("import os, signal, sys, time\nRANK = int(os.environ['RANK'])\n" + textwrap.dedent(script))
    done = subprocess.run(
        [sys.executable, "-m", "shardlib", "run", *options, str(path), *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | more,
    )
    return done.returncode, done.stdout, done.stderr


# ---- hostfiles


def test_hostfile():
    assert parsed(FILE) == {"worker-0": [0, 1, 2, 3], "worker-1": [0, 1]}
    for text, said in (
        ("worker-0", "line 1 of the hostfile is `worker-0`; write `worker-0 slots=4`"),
        ("a slots=2\na slots=3", "line 2 of the hostfile names `a` again"),
        ("a slots=0", "line 1 of the hostfile is `a slots=0`"),
        ("# none", "the hostfile names no hosts"),
    ):
        with pytest.raises(MeshError, match=re.escape(said)):
            parsed(text)


def test_include_and_exclude():
    hosts = parsed(FILE)
    assert chosen(hosts) == hosts
    assert chosen(hosts, include="worker-1@worker-0:3,1,1") == {"worker-0": [1, 3], "worker-1": [0, 1]}
    assert list(chosen(hosts, include="worker-1@worker-0")) == ["worker-0", "worker-1"], "in the order of the file"
    assert chosen(hosts, exclude="worker-0") == {"worker-1": [0, 1]}
    assert chosen(hosts, exclude="worker-0:0,2@worker-1:1") == {"worker-0": [1, 3], "worker-1": [0]}
    for options, said in (
        (dict(include="worker-0", exclude="worker-1"), "--include and --exclude exclude each other"),
        (dict(include="worker0"), "`worker0` is not in the hostfile (did you mean `worker-0`?)"),
        (dict(include="worker-1:2"), "`worker-1` has slots 0 to 1, not `2`"),
        (dict(exclude="worker-1:a"), "`worker-1:a`: slots are numbers with commas between them"),
        (dict(include="worker-1:0@worker-1:1"), "names `worker-1` twice"),
        (dict(exclude="worker-0@worker-1"), "leaves no slot of `worker-0` and `worker-1`"),
    ):
        with pytest.raises(MeshError, match=re.escape(said)):
            chosen(hosts, **options)


def test_what_cannot_be_run(tmp_path, capsys):
    (tmp_path / "hosts").write_text(FILE)
    for options, said in (
        (["--nnodes", "3:1"], "--nnodes 3:1: write the number of hosts, or the least and the most: 1:4"),
        (["--nnodes", "2"], "several hosts need a --hostfile, or --master HOST on each of them"),
        (["--include", "a"], "choose hosts of a --hostfile, which is not given"),
        (["--hostfile", str(tmp_path / "none")], "the hostfile cannot be read"),
        (["--hostfile", str(tmp_path / "hosts"), "--nnodes", "1:4"], "the hostfile gives 2 host(s)"),
    ):
        assert main(["run", *options, "train.py"]) == 2
        assert said in capsys.readouterr().err


# ---- one host


def test_arguments_output_and_logs(tmp_path):
    script = """
    print("to", sys.argv[1:], os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"], os.environ["OMP_NUM_THREADS"])
    print("loud", file=sys.stderr)
    """
    arguments = ("--steps", "3", "--nproc", "5")
    code, out, err = run(script, tmp_path, "--nproc", "2", "--log-dir", str(tmp_path / "logs"), arguments=arguments)
    said = f"to {list(arguments)} 2 127.0.0.1 "
    assert code == 0 and sorted(x[: 9 + len(said)] for x in out.splitlines()) == [f"[rank {r}] {said}" for r in (0, 1)]
    assert sorted(err.splitlines()) == ["[rank 0] loud", "[rank 1] loud"]
    assert sorted(p.name for p in (tmp_path / "logs").iterdir()) == [
        f"rank{r}.{x}" for r in (0, 1) for x in ("err", "out")
    ]
    assert (tmp_path / "logs" / "rank1.err").read_text() == "loud\n"
    again = Logs(tmp_path / "logs").reify({0: {"RANK": "1"}})
    assert again.stdouts[0] == str(tmp_path / "logs" / "round2" / "rank1.out"), "those of another run stay"


def test_a_killed_rank_is_named_and_all_start_again(tmp_path):
    """In the second round a rank fails; the others have time to say what they make of it."""
    script = """
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL) if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else sys.exit(7)
    time.sleep(0.5)
    sys.exit("this is what I make of it")
    """
    code, _, err = run(script, tmp_path, "--nproc", "2", "--max-restarts", "1", "--log-dir", str(tmp_path))
    host = socket.gethostname()
    first, second, third = (line for line in err.splitlines() if "shardlib run:" in line)
    assert re.match(rf"shardlib run: rank 1 \(pid \d+ on {host}\) was killed by SIGKILL: out of memory", first)
    assert second == f"shardlib run: round 2: {host} is host 1 of 1"
    assert code == 7 and third.endswith("failed with exit code 7; with it ended 0")
    assert err.count("[rank 0] this is what I make of it") == 2
    assert (tmp_path / "round2" / "rank0.err").read_text() == "this is what I make of it\n"
    assert (tmp_path / "rank0.out").exists()


def test_all_listens_at_loopback_and_who_raises_is_told_first(tmp_path):
    """The agent with its stores, and ranks with groups for a mesh and for a save beside the run, over IPv4 and IPv6."""
    script = """
    from pathlib import Path
    import torch
    import shardlib as sl

    def listening(pid):
        held = set()
        for file in Path(f"/proc/{pid}/fd").iterdir():
            try:
                held.add(os.readlink(file))
            except OSError:  # closed meanwhile
                pass
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                _, at, _, state, *more = line.split()
                if state == "0A" and f"socket:[{more[5]}]" in held:
                    yield at.split(":")[0]

    with sl.make_mesh(dp=2, timeout=20):
        total = sl.jit(sl.shard_map(lambda x: sl.psum(x, "dp"), in_specs="n/dp", out_specs="n"))
        x = sl.shard(torch.ones(4), "n/dp")
        total(x)
        sl.save(sys.argv[1], {"x": x}, step=0, wait=False).wait()
        for who, pid in (("rank", os.getpid()), ("agent", os.getppid())):
            sys.stdout.write(" ".join([who, *listening(pid)]) + "\\n")  # at once: the other rank writes, too
        if RANK == 1:
            raise ValueError("bad row 17")
        total(x)
    """
    arguments = (str(tmp_path / "saves"),)
    began = time.monotonic()
    code, out, err = run(script, tmp_path, "--nproc", "2", arguments=arguments, OMP_NUM_THREADS="1")
    found = [line.split()[2:] for line in out.splitlines()]
    assert len(found) == 4 and min(map(len, found)) > 1, (found, err)
    for where in (x for _, *more in found for x in more):
        parts = [struct.pack("=I", int(where[i : i + 8], 16)) for i in range(0, len(where), 8)]
        assert ipaddress.ip_address(b"".join(parts)).is_loopback, found
    assert code == 1 and time.monotonic() - began < 60
    assert "RankError: rank 1 failed: ValueError: bad row 17\n" in err and "rank 0 waited for psum `" in err, err
    last = err[err.index("shardlib run: rank 1 ") :].splitlines()
    assert last[0].endswith("failed with exit code 1; with it ended 0")
    assert last[1].startswith("Traceback") and last[-1] == "ValueError: bad row 17"


def failure(exitcode: int, error: str = "", timestamp: int = 10) -> ProcessFailure:
    made = ProcessFailure(local_rank=0, pid=1, exitcode=exitcode, error_file="none")
    made.timestamp = timestamp
    if error:
        made.message = {"message": error, "extraInfo": {"py_callstack": f"Traceback\n{error}"}}  # type: ignore
    return made


def test_who_is_to_blame():
    told = failure(1, "RankError: rank 2 failed: ValueError: bad row 17", timestamp=1)
    own, killed, ended = failure(1, "ValueError: bad row 17"), failure(-9), failure(-15)
    assert culprit({0: told, 1: told, 2: own})[0] == 2
    assert culprit({0: told, 2: killed, 3: ended})[0] == 2
    assert culprit({0: ended, 1: failure(3)})[0] == 1 and culprit({0: failure(1), 1: failure(7)}, first={1})[0] == 1
    assert culprit({1: told, 3: ended})[0] == 1 and culprit({0: told, 1: killed}, first={0})[0] == 0, "killed by us"
    said = f"rank 2 (pid 1 on {socket.gethostname()}) failed with exit code 1; with it ended 0"
    assert report({0: told, 2: own}) == f"{said}\nTraceback\nValueError: bad row 17"


# ---- several hosts


@pytest.fixture
def fleet(tmp_path: Path) -> list[str]:
    """The options for two hosts, `a` and `b`, which are this machine."""
    (tmp_path / "hosts").write_text("a slots=1\nb slots=2\n")
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nHOST_SAID=$1 exec sh -c "$2"\n')
    ssh.chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return ["--hostfile", str(tmp_path / "hosts"), "--ssh", str(ssh), "--master", f"127.0.0.1:{port}"]


def test_what_fails_on_one_host_ends_the_other(tmp_path, fleet):
    script = """
    print("of", os.environ["WORLD_SIZE"], "at", os.environ["HOST_SAID"], os.environ["CUDA_VISIBLE_DEVICES"])
    time.sleep(1)
    sys.exit(9) if os.environ["HOST_SAID"] == "a" else time.sleep(250)
    """
    began = time.monotonic()
    code, out, err = run(script, tmp_path, *fleet, "--grace", "3")
    ended = sorted(line.split("] ")[1] for line in out.splitlines())
    assert ended == ["of 3 at a 0", "of 3 at b 0,1", "of 3 at b 0,1"], err
    assert sorted(line[:7] for line in out.splitlines()) == ["[rank 0", "[rank 1", "[rank 2"]
    assert code == 9 and "a ended with exit code 9; the others end" in err and time.monotonic() - began < 200


def test_signals_reach_the_ranks_of_all_hosts(tmp_path, fleet):
    script = """
    import signal, sys, time
    signal.signal(signal.SIGUSR1, lambda *_: print("heard"))
    signal.signal(signal.SIGTERM, lambda *_: (print("saved"), sys.exit(0)))
    print("ready")
    while True:
        time.sleep(0.05)
    """
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script))
    command = [sys.executable, "-m", "shardlib", "run", *fleet, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as p:
        assert p.stdout is not None and p.stderr is not None
        seen: list[str] = []
        for number, word in ((signal.SIGUSR1, "ready"), (signal.SIGTERM, "heard")):
            while sum(word in line for line in seen) < 3:
                seen.append(p.stdout.readline())
            p.send_signal(number)
        rest, said = p.communicate(timeout=60)
    assert rest.count("saved") == 3 and p.returncode == 143
    assert said.count("shardlib run: ended by SIGTERM") == 2


# ---- doctor


def test_doctor_says_what_to_mend(monkeypatch):
    monkeypatch.setattr("torch.__version__", "2.9.1")
    monkeypatch.setattr("shardlib.cli.doctor.FULL", 1 << 60)
    monkeypatch.setenv("OMP_NUM_THREADS", "512")
    monkeypatch.setattr("resource.getrlimit", lambda kind: (1024, 1 << 20))

    def unknown(name: str) -> str:
        raise OSError(name)

    monkeypatch.setattr("socket.gethostbyname", unknown)
    found = {f.what: f for f in machine()}
    assert found["torch"].mend == "pip install 'torch>=2.11'" and not found["python"].mend
    assert "set GLOO_SOCKET_IFNAME" in found["host"].mend and "does not resolve" in found["host"].found
    assert found["open files"].mend.startswith("ulimit -n 4096: ") and found["open files"].found == "at most 1024"
    assert "starts 512 threads" in found["CPU"].mend and "gloo" in found["backends"].found
    assert "make room on" in found[f"disk {Path.cwd()}"].mend


def test_doctor_over_hosts(tmp_path, capsys, monkeypatch):
    """One is this machine. What the next says is made up: an old torch, little room, a clock that is late. No third."""
    (tmp_path / "hosts").write_text("here slots=1\nother slots=1\ngone slots=1\n")
    found = [
        ["python", platform.python_version()],
        ["torch", "2.9.1", "pip install 'torch>=2.11'"],
        ["disk /", "full", "make room"],
    ]
    (tmp_path / "said").write_text(json.dumps({"time": time.time() - 100, "findings": found}))
    ssh = tmp_path / "ssh"
    ssh.write_text(
        '#!/bin/sh\ncase $1 in here) exec sh -c "$2";; other) cat '
        f'{tmp_path}/said;; *) echo "no route to $1" >&2; exit 255;; esac\n'
    )
    ssh.chmod(0o755)
    monkeypatch.chdir(ROOT)
    assert main(["doctor", "--hostfile", str(tmp_path / "hosts"), "--ssh", str(ssh), "--no-link"]) == 1
    said = re.sub(r" +", " ", capsys.readouterr().out)
    assert re.search(r"^ok here \d\d things looked at$", said, re.MULTILINE), said
    assert re.search(r"^mend other: clock 1\d\d\.\d s from here\n -> synchronize the clocks", said, re.MULTILINE), said
    for line in (
        "mend other: disk / full\n -> make room",
        f"mend other: torch 2.9.1, but {torch.__version__} on here\n -> install the same everywhere",
        f"mend gone does not answer, or has no shardlib there\n -> mend what `{ssh} gone` says: no route to gone",
    ):
        assert line in said, said
    assert "other: python" not in said


@pytest.mark.slow
def test_doctor_tries_the_link(capsys):
    """Ranks of `shardlib run` make a mesh and reduce."""
    main(["doctor"])
    line = next(x for x in capsys.readouterr().out.splitlines() if " link " in x)
    assert re.search(r"2 ranks reduce [\d.]+ [MG]B/s, or one number in [\d.]+ ms", line), line


# ---- training that is interrupted


@pytest.mark.slow
@pytest.mark.parametrize("how", ["time.sleep(300)", "os.kill(os.getpid(), signal.SIGSTOP)"])
def test_a_rank_that_hangs_ends_all_within_the_deadline(tmp_path, how):
    """The timeout and 4 s until the others say so, 8 s for it to do the same, and `--grace` until it is killed; also
    one that keeps SIGTERM for itself."""
    script = """
    import torch
    import shardlib as sl

    with sl.make_mesh(dp=2, timeout=3):
        total = sl.jit(sl.shard_map(lambda x: sl.psum(x, "dp"), in_specs="n/dp", out_specs="n"))
        for step in range(3):
            sl.preempted()
            if RANK == 1 and step == 2:
                open(sys.argv[1], "w").close()
                HANG
            total(sl.shard(torch.ones(4), "n/dp"))
    """
    code, _, err = run(
        script.replace("HANG", how),
        tmp_path,
        "--nproc",
        "2",
        "--grace",
        "2",
        arguments=(str(tmp_path / "began"),),
        OMP_NUM_THREADS="1",
    )
    hung = time.time() - (tmp_path / "began").stat().st_mtime
    assert code == 1 and hung < 3 + 4 + 8 + 2 + 8, (hung, err)
    said = (
        "did not reach psum `"
        if "sleep" in how
        else "did not answer: killed, frozen, or cut off with the host; rank 0 "
    )
    assert f"RankError: rank 1 {said}" in err
    last = err[err.index("shardlib run: rank ") :]
    assert last.startswith("shardlib run: rank 0 ") and f"RankError: rank 1 {said}" in last


@pytest.mark.slow
def test_sigterm_saves_and_kill_restarts(tmp_path):
    """The example on two ranks: stopped by SIGTERM, started again, a rank killed; its curve is that of one rank."""
    options = "--size tiny --layers 1 --batch 4 --steps 40 --eval-every 0 --log-every 1 --sample 1".split()
    script = [
        str(ROOT / "examples" / "train_gpt.py"),
        *options,
        "--dtype",
        "float64",
        "--save-every",
        "4",
        "--resume",
        "--timeout",
        "20",
    ]
    command = [sys.executable, "-m", "shardlib", "run", "--nproc", "2", "--max-restarts", "1", *script]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def steps(folder: Path) -> list[int]:
        file = folder / "metrics.jsonl"
        return [json.loads(x)["step"] for x in file.read_text().splitlines()] if file.exists() else []

    def run_until(step: int) -> subprocess.Popen[str]:
        p = subprocess.Popen(
            [*command, "--out", str(tmp_path)], env=env, text=True, stdout=-1, stderr=subprocess.STDOUT
        )
        deadline = time.monotonic() + 120
        while max(steps(tmp_path), default=0) < step and time.monotonic() < deadline:
            time.sleep(0.02)
        return p

    stopped = run_until(6)
    stopped.send_signal(signal.SIGTERM)
    said, _ = stopped.communicate(timeout=60)
    assert stopped.returncode == 143, said
    saves = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert saves[-1] == f"step-{steps(tmp_path)[-1]:08d}" and steps(tmp_path)[-1] < 40, "it saved where it stopped"

    killed = run_until(steps(tmp_path)[-1] + 6)
    children = Path(f"/proc/{killed.pid}/task/{killed.pid}/children").read_text().split()
    assert len(children) == 2
    os.kill(int(children[-1]), signal.SIGKILL)
    said, _ = killed.communicate(timeout=120)
    assert killed.returncode == 0 and "was killed by SIGKILL" in said and "round 2" in said, said

    alone = subprocess.run([sys.executable, *script, "--out", str(tmp_path / "alone")], env=env, capture_output=True)
    assert alone.returncode == 0
    found, wanted = (
        [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (tmp_path, tmp_path / "alone")
    )
    assert [r["step"] for r in found] == [r["step"] for r in wanted]
    losses = [[r.get("loss", r.get("val_loss")) for r in rs] for rs in (found, wanted)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-9)
