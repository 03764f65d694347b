"""Runs of several processes: who is told what when they start, disagree, die; and the launchers in experiments/launch."""

import importlib.util
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml  # flax needs it, so it is here

import moejax
from moejax.parallel import initialize, launch
from moejax.parallel.place import resolve
from moejax.parallel.roll_call import Member, ranges, roll_call

ROOT = pathlib.Path(moejax.__file__).parents[1]
LAUNCH = ROOT / "experiments" / "launch"
LOCAL = LAUNCH / "local.py"
CLUSTER = ("MOEJAX_", "JAX_COORDINATOR", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "SLURM_", "OMPI_", "TPU_", "KUBERNETES_")

VALUES = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec

def values():
    # A loss and its gradient whose sums go over all 8 devices, with rounding that depends on their order.
    mesh = jax.make_mesh((8,), ("x",))
    x = np.random.default_rng(0).normal(size=(8 * 33, 5)).astype(np.float32)
    x = jax.make_array_from_callback(x.shape, NamedSharding(mesh, PartitionSpec("x")), lambda index: x[index])
    def loss(w, x):
        local = lambda w, x: jax.lax.psum(jnp.sum(jnp.tanh(x @ w) ** 2), "x")
        return jax.shard_map(local, mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec("x")), out_specs=PartitionSpec())(w, x)
    value, gradient = jax.jit(jax.value_and_grad(loss))(np.linspace(-1, 1, 5, dtype=np.float32), x)
    return np.append(np.asarray(gradient), np.asarray(value)).tolist()
"""

TWO = (
    VALUES
    + """
import json, sys, time
import moejax
from moejax.parallel import barrier, initialize
initialize(expect_processes=2, expect_devices=8)
me, said = jax.process_index(), []
def record(call):
    try:
        call()
        said.append("nothing")
    except Exception as error:
        said.append(f"{type(error).__name__}: {error}")
barrier("start", timeout_s=60)
record(initialize)
if me == 1:
    time.sleep(3)  # three times what process 0 waits
record(lambda: barrier("late", timeout_s=1))
result = {"values": values(), "said": said, "devices": jax.device_count()}
open(f"{sys.argv[1]}.{me}", "w").write(json.dumps(result))  # stdout has Gloo's talk
barrier("end", timeout_s=60)
if len(sys.argv) > 2:
    if me == 1:
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
    values()
    print("it went on", flush=True)
"""
)


def local(*arguments, timeout=60, **environment):
    """Run experiments/launch/local.py; -> its exit status and output."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(CLUSTER)}
    command = [sys.executable, str(LOCAL), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env={**inherited, **environment})
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def alone(monkeypatch):
    """An environment that speaks of no other process."""
    for name in list(os.environ):
        if name.startswith(CLUSTER):
            monkeypatch.delenv(name)
    return monkeypatch


@pytest.fixture
def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_two_processes_agree_repeat_and_end_when_one_is_killed(tmp_path):
    """2 x 4 devices give one process's numbers, twice the same bits; a late one is named; a killed one ends the other."""
    program = tmp_path / "two.py"
    program.write_text(TWO)
    status, output = local(2, "--", program, tmp_path / "a")
    assert status == 0, output
    lines = [line for line in output.splitlines() if line.startswith("[0]")]
    assert any(re.search(r"2 processes, 8 devices, coordinator 127.0.0.1:\d+ \(from MOEJAX_\*\)", line) for line in lines), output
    assert all(re.search(rf"\[0\]   process {number} \(host \S+, pid \d+\): 4 x cpu", output) for number in (0, 1)), output
    assert "[1]   process" not in output  # process 0 speaks for all

    start = time.monotonic()
    status, output = local(2, "--heartbeat-s", 5, "--grace-s", 30, "--", program, tmp_path / "b", "kill")
    assert status == 128 + signal.SIGKILL and "process 1 ended with signal SIGKILL" in output, output
    assert "[0]" in output and ("distributed service detected fatal errors" in output or "failed: it ends now" in output), output
    assert "killing process" not in output and "it went on" not in output  # by itself, with its own message
    assert time.monotonic() - start < 40

    runs = [[json.loads((tmp_path / f"{run}.{number}").read_text()) for number in (0, 1)] for run in "ab"]
    names = {}
    exec(VALUES, names)
    one = np.array(names["values"]())
    for first, second in runs:
        assert first["values"] == second["values"] == runs[0][0]["values"] and first["devices"] == 8
        np.testing.assert_allclose(first["values"], one, rtol=0, atol=1e-5 * np.abs(one).max())
        for again, late in (first["said"], second["said"]):
            assert again.startswith("RuntimeError: initialize() was called before: this is process")
            assert late.startswith("TimeoutError") and "the barrier 'late' for at most 1 s" in late
        assert re.search(r"Missing \(1 of 2\): process 1 \(host \S+, pid \d+\)", first["said"][1]), first["said"]


def test_an_uncaught_exception_ends_its_process_at_once(tmp_path):
    """Not after JAX's 300 s, nor the 100 s of the heartbeat; --initialize joins a program that does not itself."""
    program = tmp_path / "program.py"
    program.write_text(
        "import jax, sys\nfrom moejax.parallel import barrier\nassert jax.process_count() == 2 and sys.argv[1:] == ['a b']\n"
        "if jax.process_index() == 1:\n    raise KeyError('boom')\nbarrier('never', timeout_s=200)\n"
    )
    start = time.monotonic()
    status, output = local(2, "--initialize", "--heartbeat-s", 100, "--grace-s", 0.2, "--", program, "a b", timeout=90)
    assert status == 1 and "[1] KeyError: 'boom'" in output, output
    assert re.search(r"\[1\] process 1 \(host \S+, pid \d+\) failed: it ends now", output), output
    assert "killing process 0" in output and time.monotonic() - start < 60


def test_wrong_number_of_devices_is_said_on_every_process():
    status, output = local(2, "--devices-per-process", 2, "--", "-c", "from moejax.parallel import initialize as i; i(expect_devices=16)")
    assert status == 1
    for number in (0, 1):
        message = rf"\[{number}\] ValueError: There are 4 cpu devices \(2 on each of processes 0-1\); the program expects 16\."
        assert re.search(message, output), output


def test_wrong_number_of_processes_is_said_before_anything_waits(alone):
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"This run has 1 process \(nothing in the arguments.*\); the program expects 4\. Start that many"):
        initialize(expect_processes=4)
    alone.setenv("MOEJAX_COORDINATOR", "192.0.2.1:8476")  # an address that never answers
    alone.setenv("MOEJAX_PROCESSES", "2")
    alone.setenv("MOEJAX_PROCESS_ID", "1")
    with pytest.raises(ValueError, match=r"This run has 2 processes \(MOEJAX_\*\); the program expects 4\."):
        initialize(expect_processes=4)
    jax.devices()
    with pytest.raises(RuntimeError, match=r"A device was touched before initialize\(\).*Call initialize\(\) first thing"):
        initialize()
    assert time.monotonic() - start < 5


def test_one_process_needs_nothing(alone, capsys):
    initialize()
    initialize(processes=1, expect_devices=jax.device_count())
    assert capsys.readouterr().out == "One process: nothing to connect to.\n" * 2
    initialize(quiet=True)
    launch.barrier("anything", timeout_s=1)
    assert launch.who_is_who() == []
    assert capsys.readouterr().out == ""
    with pytest.raises(
        ValueError, match=rf"There are {jax.device_count()} cpu devices \({jax.device_count()} on process 0\); .* expects 3\."
    ):
        initialize(expect_devices=3)
    with pytest.raises(SystemExit):
        launch.leave(2)
    assert float(jnp.float32(1.0)) == 1.0 and not jax.distributed.is_initialized()


def test_bad_settings(alone):
    for arguments, message in (
        (
            {"coordinator": "node1:8476"},
            r"coordinator='node1:8476' \(from arguments\) is only a part.*processes= or MOEJAX_PROCESSES, process_id=",
        ),
        ({"coordinator": "node1:x", "processes": 2, "process_id": 0}, r"coordinator is 'node1:x'; it must be HOST:PORT"),
        ({"coordinator": "node1:70000", "processes": 2, "process_id": 0}, r"it must be HOST:PORT"),
        ({"coordinator": "n:1", "processes": 2, "process_id": 2}, r"process_id is 2 of 2 processes .*the numbers are 0 to 1"),
        ({"coordinator": "n:1", "processes": 0, "process_id": 0}, r"processes is 0; it must be an integer of at least 1"),
        ({"local_devices": [0]}, r"local_devices has a meaning among several processes only; for one process set CUDA_VISIBLE_DEVICES"),
        ({"timeout_s": 0}, r"timeout_s is 0; it must be a number of seconds above 0"),
        ({"heartbeat_s": -1}, r"heartbeat_s is -1"),
    ):
        with pytest.raises(ValueError, match=message):
            initialize(**arguments)
    for name, value, message in (
        ("MOEJAX_PROCESSES", "two", r"MOEJAX_PROCESSES is 'two'; it must be an integer of at least 1"),
        ("MOEJAX_PROCESS_ID", "-1", r"MOEJAX_PROCESS_ID is '-1'; it must be an integer of at least 0"),
        ("MOEJAX_LOCAL_DEVICES", "0;1", r"MOEJAX_LOCAL_DEVICES is '0;1'"),
        ("MOEJAX_TIMEOUT_S", "soon", r"MOEJAX_TIMEOUT_S is 'soon'; it must be a number of seconds"),
    ):
        with alone.context() as only:
            only.setenv(name, value)
            with pytest.raises(ValueError, match=message):
                initialize()


SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NODELIST": "node[03-04]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}


def test_where_settings_come_from(alone):
    """Arguments, MOEJAX_*, JAX_*, then the scheduler, setting by setting."""

    def found(environment, **arguments):
        with alone.context() as only:
            for name, value in environment.items():
                only.setenv(name, value)
            place = resolve(os.environ, **arguments)
        return place and (place.coordinator, place.processes, place.process_id, place.local_devices)

    assert found({}) is None and found({"MOEJAX_PROCESSES": "1"}) is None
    ours = {"MOEJAX_COORDINATOR": "a:1", "MOEJAX_PROCESSES": "3", "MOEJAX_PROCESS_ID": "2", "MOEJAX_LOCAL_DEVICES": "0,1"}
    theirs = {"JAX_COORDINATOR_ADDRESS": "b:2", "JAX_NUM_PROCESSES": "5", "JAX_PROCESS_ID": "4", "JAX_LOCAL_DEVICE_IDS": "3"}
    assert found(ours) == ("a:1", 3, 2, (0, 1))
    assert found(theirs) == ("b:2", 5, 4, (3,))
    assert found({**SLURM, **theirs, **ours}) == found(ours)
    assert found({**theirs, **ours}, coordinator="c:3", processes=9, process_id=0, local_devices=[7]) == ("c:3", 9, 0, (7,))
    assert found({**ours, "MOEJAX_COORDINATOR": "a"})[0] == "a:8476"
    assert found({**ours, "MOEJAX_COORDINATOR": "[::1]", "MOEJAX_PORT": "99"})[0] == "[::1]:99"

    # SLURM by JAX's detection. One task a host sees all GPUs (JAX alone would take one of them); several take one each.
    coordinator, *rest = found(SLURM)
    assert re.fullmatch(r"node03:\d+", coordinator) and rest == [2, 1, None]
    assert found({**SLURM, "MOEJAX_PORT": "99"})[0] == "node03:99" and found({**SLURM, "JAX_COORDINATOR_PORT": "98"})[0] == "node03:98"
    several = {**SLURM, "SLURM_NTASKS": "8", "SLURM_PROCID": "6", "SLURM_LOCALID": "2"}
    assert found(several)[1:] == (8, 6, (2,))
    assert found({**several, "CUDA_VISIBLE_DEVICES": "2"})[1:] == (8, 6, None)  # --gpus-per-task has given it its own
    assert found({**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None
    with pytest.raises(ValueError, match="but this run has several hosts; give process 0's host"):
        found({**SLURM, "MOEJAX_COORDINATOR": "localhost:1"})
    assert found({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) is None  # a notebook in a pod


def called(port, members, timeout_s=10.0):
    """The roll call of several members in threads; -> what each got or raised, in their order."""
    results = [None] * len(members)

    def call(place, member):
        try:
            results[place] = roll_call(member, "127.0.0.1", port, timeout_s)
        except (ValueError, TimeoutError) as error:
            results[place] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=call, args=pair) for pair in enumerate(members)]
    for thread in threads:
        thread.start()
        time.sleep(0.05)  # the order of the calls is that of the list, but for a process 0 that comes late
    for thread in threads:
        thread.join(60)
    return results


def member(number, processes, host="h", version="1"):
    return Member(number, processes, f"{host}{number}", 100 + number, version)


def test_roll_call(port):
    three = [member(number, 3) for number in range(3)]
    assert called(port, [three[2], three[0], three[1]]) == [three] * 3  # in any order; and the port is free again at once
    assert called(port, three) == [three] * 3

    missing = called(port, [three[0], three[2]], timeout_s=0.7)
    assert missing[0] == missing[1] and missing[0].startswith(
        "TimeoutError: 2 of 3 processes came within 0.7 s. Missing: 1. Here: process 0 (host h0"
    )
    twice = called(port, [three[0], three[1], member(1, 3, "other")])
    assert len(set(twice)) == 1 and "ValueError: process 1 (host other1, pid 101) says that it is number 1 of 3, and so says" in twice[0]
    counts = called(port, [three[0], member(1, 4)])
    assert len(set(counts)) == 1 and "counts 4 processes, process 0 (host h0, pid 100) counts 3; all must be started" in counts[0]
    outside = called(port, [three[0], member(3, 3)])
    assert "says that it is number 3 of 3; the numbers are 0 to 2" in outside[0]
    versions = called(port, [three[0], member(1, 3, version="2")])
    assert len(set(versions)) == 1 and "process 1 (host h1, pid 101) runs jax 2, process 0 (host h0, pid 100) runs jax 1" in versions[0]
    (nobody,) = called(port, [three[1]], timeout_s=0.5)
    assert "TimeoutError: process 1 (host h1, pid 101) got no word from process 0 at 127.0.0.1" in nobody and "refused" in nobody
    with socket.create_server(("", port)):
        (taken,) = called(port, [three[0]])
    assert taken.startswith(f"ValueError: Port {port} of this host (h0) cannot be opened")


def test_roll_call_survives_strangers_and_restarts(port):
    """A scanner's bytes, a silent connection, and a process that hangs up and comes again under the same number."""
    two = [member(0, 2), member(1, 2)]
    results = []
    waiting = threading.Thread(target=lambda: results.extend(called(port, [two[0]])))
    waiting.start()
    time.sleep(0.3)
    silent = socket.create_connection(("127.0.0.1", port))
    for text in (b"GET / HTTP/1.1\r\n\r\n\n", b'{"moejax": {"process_id": 1}}\n', b'{"moejax": {"process_id": 1, '):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(text)
    first = socket.create_connection(("127.0.0.1", port))  # number 1 calls, and dies before all have come
    first.sendall(json.dumps({"moejax": {**vars(member(1, 2, "gone")), "processes": 2}}).encode()[:-1])
    first.close()
    assert called(port, [two[1]]) == [two]
    waiting.join(30)
    silent.close()
    assert results == [two]


def test_ranges():
    assert ranges([3]) == "3" and ranges([7, 1, 2, 3, 9, 10]) == "1-3, 7, 9-10"


def test_local_passes_on_failure_and_interrupt(tmp_path):
    """Without JAX, so that it takes no time: the first failure ends the others, Ctrl-C ends all, bad input says so."""
    program = tmp_path / "program.py"
    program.write_text("import os, sys, time\nnumber = os.environ['MOEJAX_PROCESS_ID']\nprint('here', *sys.argv[1:])\nexec(sys.argv[1])\n")
    flags = "--a=1 --xla_force_host_platform_device_count=8"
    status, output = local(2, "--", program, "print(number, os.environ['XLA_FLAGS'])", "a b", XLA_FLAGS=flags)
    assert status == 0 and "[1] 1 --a=1  --xla_force_host_platform_device_count=4" in output and "a b" in output, output
    start = time.monotonic()
    status, output = local(3, "--grace-s", 0.2, "--", program, "time.sleep(0.3 if number == '1' else 100); sys.exit(7)")
    assert status == 7 and "process 1 ended with exit status 7" in output and "killing process 0, 2" in output, output
    assert time.monotonic() - start < 20
    code = "import signal; signal.signal(signal.SIGINT, lambda *_: (print('ends well'), sys.exit(0)))\nprint('ready')\ntime.sleep(100)"
    running = subprocess.Popen([sys.executable, str(LOCAL), "2", "--", str(program), code], stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    lines = []
    while sum("] ready" in line for line in lines) < 2:
        lines.append(running.stdout.readline())
        assert lines[-1], lines
    running.send_signal(signal.SIGINT)
    output, _ = running.communicate(timeout=30)
    assert running.returncode == 130 and output.count("ends well") == 2, output


def test_local_refuses_bad_input(capsys):
    spec = importlib.util.spec_from_file_location("local", LOCAL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
        for arguments, message in (
            (["2"], "nothing to run; give the program after --"),
            (["2", "--initialize", "--", "-c", "1"], "not -c; code"),
        ):
            assert module.main(arguments) == 2 and message in capsys.readouterr().err
        with pytest.raises(SystemExit):
            module.main(["0", "--", "program.py"])
        said = capsys.readouterr()
        assert "processes is 0; it must be at least 1" in said.err + said.out
    finally:
        del sys.modules[spec.name]


@pytest.fixture
def cluster(tmp_path):
    """run(script, arguments, **environment) with srun, scontrol and ssh that start everything here; -> status, lines, seconds."""
    tools = tmp_path / "bin"
    tools.mkdir()
    scripts = {
        # The tasks of a step, and the first bad status for all of them, as --kill-on-bad-exit=1 says.
        "srun": 'case " $* " in *" --kill-on-bad-exit=1 "*) ;; *) exit 99;; esac\nwhile [[ $1 == --* ]]; do shift; done\n'
        'for i in 0 1; do SLURM_PROCID=$i "$@" & done\nstatus=0\n'
        "for i in 0 1; do wait -n || { status=$?; kill $(jobs -p) 2>/dev/null; break; }; done\nexit $status",
        "scontrol": 'if [ "$1" = show ]; then printf "nodeA\\nnodeB\\n"; else echo "scontrol $*"; fi',
        "ssh": 'echo "to ${*: -2:1}"; exec bash -c "${*: -1}"',  # options, host, command
    }
    for name, text in scripts.items():
        (tools / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tools / name).chmod(0o755)
    program = tmp_path / "program.py"
    program.write_text(
        "import json, os, sys, time\n"
        "mine = {k: v for k, v in os.environ.items() if k.startswith(('MOEJAX_', 'JAX_COMPILATION'))}\n"
        "sys.stdout.write(json.dumps([sys.argv[1:], mine]) + '\\n')\n"  # in one piece: both write to one pipe
        "number = os.environ['MOEJAX_PROCESS_ID']\n"
        "if 'fail' in sys.argv: time.sleep(0.3 if number == '1' else 100); sys.exit(5)\n"
    )
    inherited = {key: value for key, value in os.environ.items() if not key.startswith((*CLUSTER, "JAX_COMPILATION"))}

    def run(script, *arguments, **environment):
        start = time.monotonic()
        done = subprocess.run(
            ["bash", str(LAUNCH / script), *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=tmp_path,
            env={**inherited, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHON": sys.executable, "PROGRAM": str(program), **environment},
        )
        found = [json.loads(line[line.index("[[") :]) for line in done.stdout.splitlines() if "[[" in line]
        return done.returncode, found, done.stdout + done.stderr, time.monotonic() - start

    return run


AWKWARD = ["--note", "a b", "$HOME;'\"*"]


def test_slurm_script(cluster, tmp_path):
    slurm = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NODELIST": "node[A-B]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "10007"}
    status, found, output, _ = cluster("slurm.sh", *AWKWARD, **slurm)
    assert status == 0 and len(found) == 2, output
    assert all(arguments == AWKWARD for arguments, _ in found)
    assert sorted(variables["MOEJAX_PROCESS_ID"] for _, variables in found) == ["0", "1"]
    for _, variables in found:
        assert variables["MOEJAX_COORDINATOR"] == "nodeA:20007" and variables["MOEJAX_PROCESSES"] == "2"
        assert variables["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / ".jax_cache")
    status, _, output, seconds = cluster("slurm.sh", "fail", **slurm)
    assert status == 5 and seconds < 20, output

    # pretrain: a run of its own for each job, taken up again after a requeue.
    program = tmp_path / "experiments" / "pretrain.py"
    program.parent.mkdir()
    program.write_text("import json, sys\nsys.stdout.write(json.dumps([sys.argv[1:], {}]) + '\\n')\n")
    _, found, output, _ = cluster("slurm.sh", "--steps", "9", **slurm, PROGRAM="experiments/pretrain.py")
    cache = ["--compile-cache", str(tmp_path / ".jax_cache")]
    assert [arguments for arguments, _ in found] == [["--steps", "9", "--out", "runs/slurm-10007", *cache]] * 2, output
    (tmp_path / "runs" / "slurm-10007" / "20260101-tiny" / "checkpoint" / "40").mkdir(parents=True)
    _, found, output, _ = cluster("slurm.sh", "--steps", "9", **slurm, PROGRAM="experiments/pretrain.py")
    assert [arguments for arguments, _ in found] == [["--steps", "9", "--resume", "runs/slurm-10007/20260101-tiny", *cache]] * 2, output


def test_ssh_script(cluster, tmp_path):
    status, found, output, _ = cluster("ssh.sh", *AWKWARD, HOSTS="me@nodeA nodeB", PORT="4321")
    assert status == 0 and len(found) == 2, output
    assert "[0] to me@nodeA" in output and "[1] to nodeB" in output
    for arguments, variables in found:
        assert arguments == AWKWARD and variables["MOEJAX_COORDINATOR"] == "nodeA:4321" and variables["MOEJAX_PROCESSES"] == "2"
        assert variables["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / ".jax_cache")
    assert sorted(variables["MOEJAX_PROCESS_ID"] for _, variables in found) == ["0", "1"]
    status, _, output, seconds = cluster("ssh.sh", "fail", HOSTS="nodeA nodeB")
    assert status == 5 and "ended with exit status 5; ending the others" in output and seconds < 20, output
    assert cluster("ssh.sh")[0] != 0  # no HOSTS


def test_jobset_manifest():
    manifest = yaml.safe_load((LAUNCH / "jobset.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (slice_,) = manifest["spec"]["replicatedJobs"]
    job = slice_["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    chips = np.prod([int(size) for size in pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")])
    per_host = container["resources"]["limits"]["google.com/tpu"]
    assert job["parallelism"] == job["completions"] == chips // per_host and job["completionMode"] == "Indexed"
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert manifest["spec"]["failurePolicy"]["maxRestarts"] > 0 and job["backoffLimit"] == 0 and pod["restartPolicy"] == "Never"
    variables = {item["name"]: item["value"] for item in container["env"]}
    assert all(isinstance(value, str) for value in variables.values())  # Kubernetes refuses numbers
    assert int(variables["JAX_COORDINATOR_PORT"]) in [port["containerPort"] for port in container["ports"]]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    (script,) = container["args"]
    assert container["command"] == ["bash", "-c"] and script.splitlines()[-1].startswith("exec ")
    assert variables["JAX_COMPILATION_CACHE_DIR"] in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
