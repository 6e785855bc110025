"""The recipes in scripts/: compares their plans (--dry-run) with their comments, runs each briefly on a small model,
switches a run to ssmax, and checks how the recipes for many machines start their ranks (a program that records its
arguments stands in for mpirun and srun).

TRAIN_GPT2CU_ON_CPU=path names the CUDA trainer built for the CPU, which plans a GPU's memory (default:
./train_gpt2cu_on_cpu). Without it those tests are skipped.
"""
import json
import os
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

import squad_files
from calls import call, prepare
from trainer import (MODEL, ROOT, TRAIN, checkpoint, environment, make_data, metrics, says, script_of, tokens, train,
                     write_shard)

SCRIPTS = ROOT / "scripts"
RECIPES = {"run_124M_fineweb.sh": ("123,551,232", "tied", "softmax"),
           "run_162M_slimpajama_ssmax.sh": ("162,148,752", "untied", "ssmax")}
ALL = [*RECIPES, "switch_to_ssmax.sh", "squad_sft.sh", "run_multi_node.sbatch", "run_multi_node_mpi.sh", "launch.sh"]
CUDA_TRAIN = Path(os.environ.get("TRAIN_GPT2CU_ON_CPU", ROOT / "train_gpt2cu_on_cpu")).absolute()
# after a recipe's own flags, so that these take precedence
SMALL = ["--model", MODEL, "--batch", 1, "--seq-len", 8, "--total-batch-tokens", 16]
needs_cuda_train = pytest.mark.skipif(not CUDA_TRAIN.exists(), reason=f"no {CUDA_TRAIN.name}: make it first")
needs_mpirun = pytest.mark.skipif(not shutil.which("mpirun"), reason="needs mpirun")
USAGE, RESOURCE = 2, 4


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A shard with as many tokens as the largest step reads, like the shards of the recipes."""
    folder = tmp_path_factory.mktemp("recipes")
    write_shard(folder / "d_train_000001.bin", tokens(2_097_152 + 1))
    write_shard(folder / "d_val_000000.bin", tokens(2000, 9))
    return folder


def run(script, *flags, code=0, program=TRAIN, **variables):
    """Runs a script from another folder, without the caller's settings of recipes, and returns its output."""
    env = {name: value for name, value in environment().items()
           if name not in ("DATA", "HOSTFILE", "LAUNCH", "MODEL", "OUT", "STEP")}
    env |= {name: str(value) for name, value in {"PROGRAM": program, "GPUS": 1, **variables}.items()}
    words = [SCRIPTS / script] if isinstance(script, str) else script
    result = subprocess.run([str(word) for word in (*words, *flags)],
                            cwd="/", env=env, capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL)
    assert result.returncode == code, (script, flags, result.returncode, result.stdout + result.stderr)
    return result.stdout + result.stderr


def check_help(path, text):
    """It ends with an example and its pages, and has no Python in it."""
    found = re.search(r"\nExamples?:(.*?)\n\n?See ([^\n]+)\.\n$", text, re.S)
    assert found and Path(path).name in found[1], f"{path}: {text}"
    assert all((ROOT / page).is_file() for page in found[2].split(" and ")), f"{path}: {found[2]}"
    assert str(ROOT) not in text and "['" not in text and "None" not in text, text


@pytest.mark.parametrize("script", [*sorted(SCRIPTS.glob("*.sh")), SCRIPTS / "run_multi_node.sbatch",
                                    ROOT / "dev/fuzz/run.sh"], ids=lambda path: path.name)
def test_help_is_the_comment_at_the_top(script):
    top = re.match(r"#!.*\n((#(?!SBATCH).*\n)+)", script.read_text())[1]
    text = run([script], "--help")
    assert text == re.sub(r"^# ?", "", top, flags=re.M)
    if script.parent == SCRIPTS:
        check_help(script, text)


@pytest.mark.parametrize("script", [path for folder in (SCRIPTS, ROOT / "data") for path in sorted(folder.glob("*.py"))
                                    if '__name__ == "__main__"' in path.read_text()], ids=lambda path: path.name)
def test_help_of_python_scripts(script):
    text = call(script.name, "--help", main=lambda: runpy.run_path(str(script), run_name="__main__")).stdout
    check_help(script, text)
    assert script.name != "fineweb.py" or "(default: gpt2)" in text


def comment(script):
    """The comment at the top of a script, as one line."""
    text = (SCRIPTS / script).read_text().split("set -euo")[0]
    return re.sub(r"\s+", " ", re.sub(r"^#", "", text, flags=re.M))


def number(pattern, text):
    found = re.search(pattern, text)
    assert found, f"no {pattern} in:\n{text}"
    return float(found[1].replace(",", ""))


def test_shell():
    for script in ALL:
        subprocess.run(["bash", "-n", SCRIPTS / script], check=True)
        if shutil.which("shellcheck"):
            subprocess.run(["shellcheck", SCRIPTS / script], check=True)


# ---- one machine


@needs_cuda_train
@pytest.mark.parametrize("script", RECIPES)
def test_plan(data, script):
    """The shape, steps and memory that the comment promises: slightly more memory is enough, slightly less is not."""
    parameters, tied, attn = RECIPES[script]
    text = comment(script)
    steps, step_tokens = number(r"([\d,]+) steps of", text), number(r"steps of ([\d,]+) tokens", text)
    gpu = {"program": CUDA_TRAIN, "DATA": data, "OUT": "/nowhere/out"}
    for flags, batch, promised in (([], 64, number(r"Memory (\d+) GB", text)),
                                   (["--batch", 16], 16, number(r"(\d+) GB with --batch 16", text))):
        plan = run(script, *flags, "--dry-run", CUDA_ON_CPU_MEMORY=int((promised + 1) * 1e9), **gpu)
        says(plan, f"model     {parameters} parameters", f", {tied}\n", f"attention {attn}, L = 1024\n", "bfloat16",
             f"1 rank x {step_tokens / (batch * 1024):.0f} micro-batches of {batch} x 1024\n", "device memory per GPU",
             "host memory", "nothing was written")
        assert number(r"\nrun       ([\d,]+) steps", plan) == steps
        assert number(r"\nstep      ([\d,]+) tokens", plan) == step_tokens
        says(run(script, *flags, "--dry-run", code=RESOURCE, CUDA_ON_CPU_MEMORY=int((promised - 1) * 1e9), **gpu),
             "of device memory", "--recompute")


@pytest.mark.parametrize("script, schedule, warmup, least", [("run_124M_fineweb.sh", "cosine", 700, 0),
                                                             ("run_162M_slimpajama_ssmax.sh", "constant", 1000, 0.1)])
def test_run(data, tmp_path, script, schedule, warmup, least):
    """Runs two steps of a small model, then two more after a restart. This covers the flags that no plan shows."""
    out = tmp_path / "out"
    small = dict(DATA=data, OUT=out)
    says(run(script, *SMALL, "--steps", 2, **small), "starts at step 0", "sample at step 2")
    says(run(script, *SMALL, "--steps", 4, **small), "resumes at step 2")
    assert [step for step, in metrics(out, ["step"])] == [1, 2, 3, 4]
    arguments = json.loads((out / "run.json").read_text())["arguments"]
    expected = {"dtype": "bf16", "lr": 6e-4, "warmup": warmup, "schedule": schedule, "min-lr-frac": least,
                "weight-decay": 0.1, "beta1": 0.9,
                "beta2": 0.95, "grad-clip": 1, "attn": RECIPES[script][2], "val-data": f"{data}/*_val_*.bin"}
    assert {key: arguments[key] for key in expected} == expected


@needs_mpirun
def test_gpus_is_the_number_of_ranks(data, tmp_path):
    plan = run("run_162M_slimpajama_ssmax.sh", *SMALL, "--dry-run", DATA=data, OUT=tmp_path / "out", GPUS=2)
    says(plan, "16 tokens: 2 ranks x 1 micro-batch of 1 x 8")


def test_no_program(data):
    text = run("run_124M_fineweb.sh", code=USAGE, program="./train_gpt3", DATA=data)
    says(text, "./train_gpt3: not found", "make train_gpt2cu")


# ---- GPUs with less shared memory


@needs_cuda_train
@pytest.mark.parametrize("dtype, model, heads, needed", [
    ("bf16", "channels=128,block=gau", 128, 106), ("fp32", "channels=128,heads=1,ffn=16", 128, 138),
    ("fp32", "channels=64,heads=1,ffn=16", 64, None)])
def test_shared_memory_of_a_block(tmp_path, dtype, model, heads, needed):
    """With 99 KB per block, heads of 128 are rejected before any allocation; with what the message asks, they train."""
    make_data(tmp_path)
    flags = [CUDA_TRAIN, "--train-data", tmp_path / "d_train_*.bin", "--model", f"layers=1,vocab=97,{model}",
             "--dtype", dtype, "--batch", 1, "--seq-len", 8, "--steps", 1, "--out", tmp_path / "out"]
    if needed:
        text = run(flags, code=USAGE, CUDA_ON_CPU_CAPABILITY=86)
        says(text, f"a head size of {heads} needs {needed} KB of shared memory per block, but this GPU has only 99 KB.")
        assert not (tmp_path / "out").exists()
    enough = (needed or 99) * 1024
    says(run(flags, CUDA_ON_CPU_CAPABILITY=86, CUDA_ON_CPU_SHARED=enough), "ckpt/step-00000001")


# ---- scripts/switch_to_ssmax.sh


@pytest.fixture
def softmax(tmp_path):
    """A softmax run with a checkpoint of step 4."""
    make_data(tmp_path)
    train(tmp_path, "--attn", "softmax", "--val-data", tmp_path / "d_val_000000.bin", "--val-every", 2, "--steps", 4,
          "--ckpt-every", 2, "--out", tmp_path / "out")
    return tmp_path / "out"


def lineage(out):
    return [(entry["step"], entry["attn"]) for entry in json.loads((out / "run.json").read_text())["lineage"]]


def attention(out, step):
    return json.loads((checkpoint(out, step) / "config.json").read_text())["attention_normalizer"]["name"]


def test_switch(softmax):
    before = (softmax / "run.json").read_bytes()
    says(run("switch_to_ssmax.sh", OUT=softmax), "already at step 4; pass a --steps larger than 4 to continue")
    plan = run("switch_to_ssmax.sh", "--steps", 6, "--dry-run", OUT=softmax)
    says(plan, "attention softmax, L = 8", "switch    to ssmax at step 4\n", "nothing was written")
    assert (softmax / "run.json").read_bytes() == before
    text = run("switch_to_ssmax.sh", "--steps", 6, OUT=softmax)
    says(text, "resumes at step 4", "attn_scale, 0.", "step 4: switched --attn softmax to ssmax; validation loss")
    assert attention(softmax, 6) == "ssmax" and lineage(softmax) == [(0, "softmax"), (4, "ssmax")]
    rates = [lr for lr, in metrics(softmax, ["lr"])]
    assert rates[4:6] == rates[:2]                              # the warmup restarts
    text = run("switch_to_ssmax.sh", "--steps", 8, OUT=softmax)
    says(text, "resumes at step 6")
    assert "switched" not in text and lineage(softmax) == [(0, "softmax"), (4, "ssmax")]


def test_switch_later(softmax):
    """The switch happens at a given step, with a stop before and after it."""
    for steps, there in ((5, []), (7, [(6, "ssmax")]), (8, [(6, "ssmax")])):
        run("switch_to_ssmax.sh", "--steps", steps, OUT=softmax, STEP=6)
        assert lineage(softmax) == [(0, "softmax"), *there]
    assert attention(softmax, 8) == "ssmax"
    says(run("switch_to_ssmax.sh", "--steps", 9, OUT=softmax, STEP=3, code=USAGE), "the run is already at step 8")


def test_switch_without_a_checkpoint(tmp_path):
    says(run("switch_to_ssmax.sh", OUT=tmp_path, code=USAGE), f"{tmp_path}/ckpt: no checkpoint", "OUT=")


# ---- scripts/squad_sft.sh


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A folder with a checkpoint to fine-tune, and shards of 41 examples; five steps of eight are an epoch, rounded."""
    folder = tmp_path_factory.mktemp("squad")
    squad_files.write(folder / "train.json", "1.1", *squad_files.facts(41))
    squad_files.write(folder / "dev.json", "1.1", *squad_files.facts(6))
    prepare("squad", "--json", folder / "train.json", "--val-json", folder / "dev.json", "--tokenizer",
            squad_files.write_bytes_tokenizer(folder), "--out", folder / "squad [1.1]")
    train(folder / "squad [1.1]", "--model", f"{MODEL},vocab={squad_files.END + 1}", "--seq-len", 64, "--steps", 1,
          "--out", folder / "base")
    return folder


@pytest.fixture
def base(pretrained, tmp_path):
    shards = shutil.copytree(pretrained / "squad [1.1]", tmp_path / "squad [1.1]")
    return {"MODEL": checkpoint(pretrained / "base", 1), "DATA": shards, "OUT": tmp_path / "out"}


SMALL_SFT = ["--seq-len", 64, "--batch", 4, "--total-batch-tokens", 8 * 64]


def test_squad_sft(base):
    """In ten epochs at a learning rate for a small model, the answers' loss falls. A restart finds the run done."""
    text = run("squad_sft.sh", *SMALL_SFT, "--lr", 0.02, "--attn", "ssmax", **base)
    says(text, "validation loss", "attn_scale, 0.")
    out, arguments = base["OUT"], json.loads((base["OUT"] / "run.json").read_text())["arguments"]
    expected = {"steps": 51, "warmup": 5, "val-every": 51, "dtype": "bf16", "schedule": "cosine", "min-lr-frac": 0,
                "weight-decay": 0, "beta1": 0.9, "beta2": 0.999, "grad-clip": 1, "pack": "example", "attn": "ssmax",
                "init-from": str(base["MODEL"]), "val-data": f"{base['DATA']}/*_val_*.bin"}
    assert {key: arguments[key] for key in expected} == expected
    rows = metrics(out, ["loss", "lr", "val_loss"])
    first, last = (sum(loss for loss, _, _ in part) / 5 for part in (rows[:5], rows[-5:]))
    # ln 257 is 5.5, and six tokens count.
    assert first > 20 and last < 0.6 * first and rows[-1][2] < 0.6 * first, (first, last, rows[-1])
    assert [lr for _, lr, _ in rows[:5]] == pytest.approx([0.004, 0.008, 0.012, 0.016, 0.02]) and rows[-1][1] < 1e-4
    says(run("squad_sft.sh", *SMALL_SFT, "--lr", 0.02, "--attn", "ssmax", **base),
         "already at step 51")


def test_plan_of_squad_sft(base, tmp_path):
    """Steps and warmup for other sizes, with nothing overridden but the size, and without shards for validation."""
    for path in base["DATA"].glob("*_val_*"):
        path.unlink()
    plan = run("squad_sft.sh", "--seq-len", 64, "--total-batch-tokens", 16 * 64, "--dry-run", **base)
    says(plan, "41 windows of 64, 2.6 steps per epoch\n", "run       26 steps", "attention softmax, L = 64", "bfloat16",
         "nothing was written")
    assert not base["OUT"].exists() and "validation" not in plan
    run("squad_sft.sh", *SMALL_SFT, "--steps", 1, **base)
    assert json.loads((base["OUT"] / "run.json").read_text())["arguments"]["lr"] == 2e-5


def test_squad_sft_says_what_is_missing(base, tmp_path):
    says(run("squad_sft.sh", code=USAGE, DATA=base["DATA"]), "name the checkpoint to start from: MODEL=")
    says(run("squad_sft.sh", code=3, **base | {"DATA": tmp_path / "none"}), "no file matches")
    says(run("squad_sft.sh", "--seq-len", 64, code=3, **base), "41 documents", "at least 2,048 are needed")


# ---- many machines


@pytest.fixture
def launcher(tmp_path):
    """A folder for PATH with an mpirun and an srun that only record their arguments, and a Slurm of two machines."""
    folder = tmp_path / "bin"
    folder.mkdir()
    record = f'printf "%s\\n" "$OMP_NUM_THREADS" "${{0##*/}}" "$@" > {tmp_path}/called'
    for name, text in (("mpirun", record), ("scontrol", "echo node-a; echo node-b"),
                       ("srun", f'[ "$1" != --mpi=list ] || {{ echo "none pmi2 $PLUGINS" >&2; exit; }}\n{record}')):
        script_of(folder / name, text, "bash")
    return {"PATH": f"{folder}:{os.environ['PATH']}", "PLUGINS": "pmix pmix_v4", "SLURM_JOB_ID": 7,
            "SLURM_JOB_NUM_NODES": 2, "SLURM_NTASKS_PER_NODE": 8, "SLURM_JOB_NODELIST": "node-[a-b]",
            "TMPDIR": tmp_path}


def called(tmp_path):
    """(threads, the launcher's own arguments, the program's arguments) of the last call."""
    threads, *words = (tmp_path / "called").read_text().splitlines()
    at = words.index(str(TRAIN))
    return threads, words[:at], words[at + 1:]


def sequences(flags):
    """The number of sequences in a step, and in a batch."""
    last = {flags[i]: flags[i + 1] for i in range(len(flags) - 1)}
    return int(last["--total-batch-tokens"]) // int(last["--seq-len"]), int(last["--batch"])


def test_slurm(launcher, tmp_path):
    text = (SCRIPTS / "run_multi_node.sbatch").read_text()
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", text, re.M))
    assert text.index("#SBATCH") < text.index("set -euo")         # sbatch stops reading at the first command
    assert asked["ntasks-per-node"] == asked["gpus-per-node"] == "8"
    assert asked["signal"] == "B:USR1@300"                        # SIGUSR1 makes the trainer save and end: test_signal
    run("run_multi_node.sbatch", SCRIPTS / "run_124M_fineweb.sh", "--batch", 16, "--dry-run",
        SLURM_CPUS_PER_TASK=6, DATA="/d", OUT="/o", **launcher)
    threads, own, program = called(tmp_path)
    assert (own == ["srun", "--mpi=pmix", "--cpus-per-task=6", "--cpu-bind=none", "--kill-on-bad-exit=1"]
            and threads == "6")
    assert program[:6] == ["--train-data", "/d/*_train_*.bin", "--val-data", "/d/*_val_*.bin", "--out", "/o"]
    assert program[-3:] == ["--batch", "16", "--dry-run"]
    whole, batch = sequences(program)
    processes = int(asked["nodes"]) * int(asked["ntasks-per-node"])
    assert whole % (batch * processes) == 0


def test_slurm_without_pmix(launcher, tmp_path):
    """Then Open MPI's own launcher starts the ranks within the allocation, of a user's own command, too."""
    sbatch, flags = SCRIPTS / "run_multi_node.sbatch", ["--out", "/o", "--resume"]
    subprocess.run([sbatch, TRAIN, *flags], env=environment(**{x: str(y) for x, y in launcher.items()}), check=True,
                   cwd=ROOT)
    assert called(tmp_path)[1][0] == "srun" and called(tmp_path)[2] == flags
    without = {x: str(y) for x, y in launcher.items()} | {"PLUGINS": ""}
    subprocess.run([sbatch, TRAIN, *flags], env=environment(**without), check=True, cwd=ROOT)
    _, own, program = called(tmp_path)
    assert own[:3] == ["mpirun", "-np", "16"] and "OMP_NUM_THREADS=8" in own and program == flags
    assert Path(own[own.index("--hostfile") + 1]).read_text() == "node-a slots=8\nnode-b slots=8\n"
    (tmp_path / "bin/mpirun").unlink()
    (tmp_path / "bin/grep").symlink_to(shutil.which("grep"))
    done = subprocess.run(["/bin/bash", sbatch, TRAIN], env=without | {"PATH": str(tmp_path / "bin")}, text=True,
                          capture_output=True, cwd=ROOT)
    assert done.returncode == USAGE and "expected pmix in" in done.stderr and "or mpirun in PATH" in done.stderr


def hostfile(tmp_path, text):
    (tmp_path / "hosts").write_text(text)
    return tmp_path / "hosts"


def test_hostfile(launcher, tmp_path):
    hosts = hostfile(tmp_path, "# two machines\nnode-a slots=8\n\nnode-b  slots=8 max_slots=8\n")
    variables = {**launcher, "HOSTFILE": hosts, "NCCL_SOCKET_IFNAME": "eth7", "UCX_TLS": "tcp", "OMP_NUM_THREADS": 3,
                 "FORWARD": "MY_SETTING OTHER", "MY_SETTING": "a", "NCCL_TOKEN": "secret", "CUDA_TOKEN": "secret"}
    run("run_multi_node_mpi.sh", SCRIPTS / "run_162M_slimpajama_ssmax.sh", "--steps", 7, DATA="/d", **variables)
    _, own, program = called(tmp_path)
    assert own[:5] == ["mpirun", "-np", "16", "--map-by", "slot:OVERSUBSCRIBE"]
    assert own[own.index("--hostfile") + 1] == str(hosts)
    handed_on = {own[i + 1] for i, word in enumerate(own) if word == "-x"}
    assert {"PATH", "NCCL_SOCKET_IFNAME", "UCX_TLS", "OMP_NUM_THREADS=3", "MY_SETTING"} <= handed_on
    assert not any("TOKEN" in name for name in handed_on), "a variable that is on no list left this machine"
    assert program[:2] == ["--train-data", "/d/*_train_*.bin"] and program[-2:] == ["--steps", "7"]
    whole, batch = sequences(program)
    assert whole % (batch * 16) == 0
    run("run_multi_node_mpi.sh", TRAIN, "--steps", 7, **variables)
    assert called(tmp_path)[1][:3] == own[:3] and called(tmp_path)[2] == ["--steps", "7"]


@pytest.mark.parametrize("text, ranks, here, where", [
    ("node-a\n" * 4 + "node-b\n" * 4, 8, 4, "node-a:4,node-b:4"),
    ("node-a\nnode-b\n", 6, 3, "node-a:3,node-b:3"),
    ("node-a slots=6\nnode-b slots=2\n", 8, 6, None),
])
def test_shares_of_the_cores(launcher, tmp_path, text, ranks, here, where):
    """A name in several lines is one machine; without slots, shares are equal. The threads suit the machine with the
    most ranks."""
    hosts = hostfile(tmp_path, text)
    script_of(tmp_path / "bin/nproc", "echo 24")
    run("launch.sh", ranks, TRAIN, **{**launcher, "HOSTFILE": hosts, "OMP_NUM_THREADS": ""})
    _, own, _ = called(tmp_path)
    assert f"OMP_NUM_THREADS={24 // here}" in own
    assert own[own.index("--host" if where else "--hostfile") + 1] == (where or str(hosts))


def test_machines_that_cannot_be_reached(launcher, tmp_path):
    """They are named, and nothing is started."""
    hosts = hostfile(tmp_path, "localhost\nnode-a\nnode-b\nnode-c\n")
    script_of(tmp_path / "bin/ssh", "shift 4\n[ $1 = node-b ] || { echo No route to $1 >&2; exit 255; }")
    said = run("launch.sh", 4, TRAIN, code=6, **{**launcher, "HOSTFILE": hosts, "SLURM_JOB_ID": ""})
    says(said, "cannot reach these machines", "node-a: No route to node-a\n", "node-c: No route to node-c\n")
    assert "node-b" not in said and "localhost" not in said and not (tmp_path / "called").exists()
    hosts.write_text("node-a slots=4\n")
    says(run("launch.sh", 4, TRAIN, code=6, **{**launcher, "HOSTFILE": hosts, "SLURM_JOB_ID": ""}),
         "node-a: No route to node-a\n")


def test_a_hostfile_with_an_option_of_ssh(launcher, tmp_path):
    hosts = hostfile(tmp_path, f"-oProxyCommand=touch${{IFS}}{tmp_path}/ran slots=4\n")
    said = run("launch.sh", 4, TRAIN, code=USAGE, **{**launcher, "HOSTFILE": hosts, "SLURM_JOB_ID": ""})
    assert 'begins with "-"' in said and not (tmp_path / "ran").exists()


@pytest.mark.parametrize("slots", ["slots=0", "slots=-2", "slots=4x", "slots=", "slots", "slots=1000000"])
def test_slots_that_are_no_numbers(launcher, tmp_path, slots):
    hosts = hostfile(tmp_path, f"node-a slots=4\nnode-b {slots} # of 8\nnode-c slots=4 max_slots=0\n")
    said = run("launch.sh", 4, TRAIN, code=USAGE, **{**launcher, "HOSTFILE": hosts})
    says(said, f"node-b {slots} # of 8: expected slots=K, a number from 1 to 99999.")


def test_a_hostfile_from_windows(launcher, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_bytes(b"node-a slots=4\t# caf\xc3\xa9\r\n")
    text = run("launch.sh", 4, TRAIN, code=USAGE, **{**launcher, "HOSTFILE": hosts})
    subprocess.run(["sed", "-i", text.split("sed -i '")[1].split("'")[0], hosts], check=True)
    run("launch.sh", 4, TRAIN, **{**launcher, "HOSTFILE": hosts})


@pytest.mark.parametrize("text", ["node-a slots = 8\nnode-b slots=4\n", "node-a slots=8\nnode-b\n", "# none\n"])
def test_bad_hostfile(tmp_path, text):
    text = run("run_multi_node_mpi.sh", SCRIPTS / "run_124M_fineweb.sh", code=USAGE, HOSTFILE=hostfile(tmp_path, text))
    says(text, tmp_path / "hosts", "the same number of GPUs on each machine")


def test_nothing_outlives_mpirun_when_a_machine_vanishes(tmp_path):
    """Its ssh client to the machine would hold launch.sh's output open until TCP gives up, 15 minutes later."""
    mpirun = script_of(tmp_path / "mpirun", "sleep 300 &\n"
                       "echo 'train_gpt2: no heartbeat from rank 1 on b for 4 s' >&2\nsleep 1\nexit 6")
    hosts = hostfile(tmp_path, "node-a slots=1\nnode-b slots=1\n")
    done = subprocess.run([SCRIPTS / "launch.sh", "2", TRAIN],
                          env=environment(MPIRUN=mpirun, HOSTFILE=str(hosts), GRACE="20", SLURM_JOB_ID="7"),
                          capture_output=True, text=True, timeout=30)
    assert done.returncode == 6 and "no heartbeat from rank 1" in done.stderr


@pytest.mark.parametrize("words", [["run_multi_node.sbatch"], ["run_multi_node_mpi.sh"],
                                   ["run_multi_node_mpi.sh", SCRIPTS / "run_124M_fineweb.sh"]])
def test_missing_arguments_are_named(words):
    expected = "expected a readable file" if words[1:] else "expected a recipe"
    says(run(*words, code=USAGE), words[0], expected)


@needs_mpirun
def test_hostfile_with_mpirun_itself(data, tmp_path):
    """Uses mpirun itself, on this machine alone."""
    hosts = hostfile(tmp_path, "localhost slots=2\n")
    plan = run("run_multi_node_mpi.sh", SCRIPTS / "run_124M_fineweb.sh", *SMALL,
               "--dry-run", HOSTFILE=hosts, DATA=data)
    says(plan, "16 tokens: 2 ranks x 1 micro-batch of 1 x 8", "nothing was written")
