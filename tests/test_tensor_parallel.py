"""Tensor parallelism in real processes: every rank holds a part of the KV heads, and together they do what one does.

Sums over ranks round otherwise than one sum. That changes these logits, of up to 17, by some 1e-5 in float32 and 1e-14
in float64; projections of other heads change them by more than 0.1. Most cases are in float64: in float32 rounding may
turn a sign of a code, or choose the other of two tokens whose scores are nearly the same.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import tensor_ranks
import tiny
import torch
import transformers
from filelock import FileLock

from bpc_artifacts import LayerProjection, ProjectionArtifact
from bpc_calib import ModelError, calibrate, describe, tensor_parallel
from bpc_calib.models.description import first_head, heads_per_rank, held_heads
from bpc_calib.models.loading import load_model

ROUNDING = {"float64": 1e-10, "float32": 1e-4}


def torchrun(ranks: int, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a module or a script in processes that rendezvous on this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"} | environment
    return subprocess.run(
        [*command, *map(str, words)], capture_output=True, text=True, env=environment, timeout=300, check=False
    )


def our_errors(ran: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the errors that are not torchrun's own."""
    return [line for line in ran.stderr.splitlines() if "Error:" in line and "ChildFailedError" not in line]


def run(folder: Path, cases: dict, ranks: int) -> list[dict]:
    """Run cases on some ranks; return what each rank found."""
    folder.mkdir(exist_ok=True)
    (folder / "cases.json").write_text(json.dumps(cases))
    ran = torchrun(ranks, tensor_ranks.__file__, folder)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(ranks)]


def saved(folder: Path, heads: int, kv_heads: int, family: str = "llama") -> str:
    """Write a tiny model with these heads."""
    path = folder / f"{family}-{heads}-{kv_heads}"
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": 16 * heads}
    return str(tiny.save(path, family, **sizes))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """What two ranks found, and the cases; pytest's workers share one run."""
    base, workers = tmp_path_factory.getbasetemp(), os.environ.get("PYTEST_XDIST_WORKER")
    folder = (base.parent if workers else base) / "two-ranks"
    with FileLock(f"{folder}.lock"):
        if not (folder / "rank-1.pt").exists():
            run(folder, two_rank_cases(folder), 2)
    return json.loads((folder / "cases.json").read_text()), [torch.load(folder / f"rank-{rank}.pt") for rank in (0, 1)]


def two_rank_cases(folder: Path) -> dict:
    """Write the models, and return the cases."""
    grouped = saved(folder, 4, 2)
    return {
        "demo, calibrated": {"model": "demo", "codes": "signs", "more": True},
        "demo, online": {"model": "demo", "codes": "online"},
        "a head each, calibrated": {"model": grouped, "codes": "signs"},
        "a head each, online": {"model": grouped, "codes": "online"},
        "two heads each": {"model": saved(folder, 8, 4), "codes": "signs"},
        # A model of its own: torch 2.8 cannot look up tokens in two dtypes of one shape of embedding.
        "compiled kernels": {"model": saved(folder, 2, 2), "codes": "signs", "dtype": "float32"},
        "all heads everywhere": {"model": saved(folder, 4, 2, "phi3"), "codes": "signs"},
        "one head copied, calibrated": {"model": saved(folder, 4, 1), "codes": "signs", "copied": True, "more": True},
        "one head copied, online": {"model": str(folder / "llama-4-1"), "codes": "online", "copied": True},
        "cut": {"model": str(folder / "llama-4-1"), "refused": True},
        "three heads": {"model": saved(folder, 6, 3), "refused": True},
    }


COPIED = ["one head copied, calibrated", "one head copied, online"]
SHARED = [
    "demo, calibrated", "demo, online", "compiled kernels", "a head each, calibrated", "a head each, online",
    "two heads each", "all heads everywhere",
]  # fmt: skip


def one_process(case: dict, ranks: int = 1) -> tuple:
    """Return the model of a case in this process, its projections, and their KV heads.

    Where KV heads are on several ranks, each rank chooses for its own query heads. One process does the same with a
    model that has the same KV heads several times.
    """
    model = load_model(case["model"], dtype=case.get("dtype", "float64"))
    artifact = tensor_ranks.artifact_of(model.config, case["codes"])
    if case.get("copied"):
        model, artifact = with_copies(model, artifact, ranks)
    return model, artifact, describe(model.config).kv_heads


def with_copies(model, artifact, kv_heads: int) -> tuple:
    """Return the same function as a model with more KV heads, and the projections of its heads."""
    old, dim = describe(model.config).kv_heads, describe(model.config).head_dim
    copies = kv_heads // old
    config = transformers.AutoConfig.for_model(**(model.config.to_dict() | {"num_key_value_heads": kv_heads}))
    state = {
        name: weight.unflatten(0, (old, dim)).repeat_interleave(copies, 0).flatten(0, 1)
        if "k_proj" in name or "v_proj" in name
        else weight
        for name, weight in model.state_dict().items()
    }
    wider = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    wider.load_state_dict(state)
    if artifact is None:
        return wider, None
    names = "projection", "residual", "metric", "mean"
    layers = {
        index: LayerProjection(**{name: numpy.repeat(getattr(layer, name), copies, axis=0) for name in names})
        for index, layer in artifact.layers.items()
    }
    return wider, ProjectionArtifact(layers, artifact.metadata | {"model": describe(config).metadata()})


@pytest.mark.parametrize("name", SHARED + COPIED)
def test_two_ranks_choose_and_answer_as_one_process(two_ranks, name):
    cases, found = two_ranks
    model, artifact, kv_heads = one_process(cases[name], 2)
    compare(model, artifact, kv_heads, [each[name] for each in found], ROUNDING[cases[name].get("dtype", "float64")])


def compare(model, artifact, kv_heads: int, found: list[dict], rounding: float) -> None:
    logits, chosen = tensor_ranks.decode(model, artifact), tensor_ranks.chosen(model, artifact)
    assert all(torch.equal(each["logits"], found[0]["logits"]) for each in found)
    torch.testing.assert_close(found[0]["logits"], logits, rtol=0, atol=rounding)
    for rank, each in enumerate(found):
        assert len(each["chosen"]) == len(chosen)
        for (layer, here), (expected_layer, tokens) in zip(each["chosen"], chosen, strict=True):
            heads = held_heads(kv_heads, here.shape[1], rank, len(found))
            assert layer == expected_layer
            assert torch.equal(here, tokens[:, heads])


@pytest.mark.parametrize("name", SHARED + COPIED)
def test_two_ranks_keep_what_one_process_keeps_for_calibration(two_ranks, name):
    """Every rank has the keys and moments of all heads, in order, and the same identity of the weights."""
    cases, found = two_ranks
    model = one_process(cases[name] | {"copied": False})[0]
    compare_kept(tensor_ranks.kept(model), [each[name]["kept"] for each in found], ROUNDING[str(model.dtype)[6:]])


def compare_kept(alone: dict, found: list[dict], rounding: float) -> None:
    for each in found:
        assert each["weights"] == alone["weights"]
        for what, scale in (("keys", 1), ("moments", 100)):
            assert list(each[what]) == list(alone[what])
            for layer, expected in alone[what].items():
                torch.testing.assert_close(each[what][layer], expected, rtol=0, atol=scale * rounding)
                assert torch.equal(each[what][layer], found[0][what][layer])


def test_projections_of_other_heads_would_show(two_ranks):
    cases, found = two_ranks
    model, artifact, _ = one_process(cases["a head each, calibrated"])
    layers = {
        index: LayerProjection(layer.projection[::-1], layer.residual[::-1], layer.metric[::-1], layer.mean[::-1])
        for index, layer in artifact.layers.items()
    }
    wrong = tensor_ranks.decode(model, ProjectionArtifact(layers, artifact.metadata))
    assert (wrong - found[0]["a head each, calibrated"]["logits"]).abs().amax() > 0.1


@pytest.mark.parametrize("name", ["demo, calibrated", "one head copied, calibrated"])
def test_sampling_static_steps_and_full_attention_are_those_of_one_process(two_ranks, name):
    cases, (first, second) = two_ranks
    rounding = ROUNDING["float64"]
    model, artifact, _ = one_process(cases[name], 2)
    assert first[name]["sampled"] == second[name]["sampled"] == tensor_ranks.sampled(model, artifact)
    torch.testing.assert_close(first[name]["static"], tensor_ranks.static(model, artifact), rtol=0, atol=rounding)
    full = tensor_ranks.decode(*one_process(cases[name] | {"copied": False})[:2], budget=1.0)
    torch.testing.assert_close(first[name]["full"], full, rtol=0, atol=rounding)


@pytest.mark.parametrize("name", ["demo, calibrated", "one head copied, calibrated"])
def test_a_step_that_chooses_sends_what_full_attention_sends(two_ranks, name):
    _, found = two_ranks
    ours, full = found[0][name]["collectives"]
    assert ours == full
    assert sum(full.values()) >= 8  # two sums per layer at least


def test_heads_that_cannot_be_shared_out_are_refused_in_one_line(two_ranks):
    _, found = two_ranks
    for each in found:
        assert each["cut"]["refused"].endswith(
            "2 processes share 1 KV heads, which tp_plan='auto' cuts in pieces: load it with "
            "distributed_config=bpc_calib.tensor_parallel(config, 2)"
        )
        assert each["three heads"]["refused"].endswith(
            "its 6 query heads and 3 KV heads have no equal parts for 2 processes: start 3 or 6"
        )


@pytest.mark.slow  # four processes; two show the same rules
@pytest.mark.rare
def test_four_ranks_choose_and_answer_as_one_process(tmp_path):
    cases = {
        "a head each": {"model": saved(tmp_path, 8, 4), "codes": "signs"},
        "two copies of each": {"model": saved(tmp_path, 8, 2), "codes": "signs", "copied": True},
        "online": {"model": str(tmp_path / "llama-8-2"), "codes": "online", "copied": True},
        "heads normalised": {"model": saved(tmp_path, 8, 4, "qwen3"), "codes": "signs"},
        "copied and normalised": {"model": saved(tmp_path, 4, 1, "qwen3"), "codes": "signs", "copied": True},
        "no groups": {"model": saved(tmp_path, 4, 4), "codes": "online"},
    }
    found = run(tmp_path, cases, 4)
    for name, case in cases.items():
        compare(*one_process(case, 4), [each[name] for each in found], ROUNDING["float64"])
        alone = tensor_ranks.kept(one_process(case | {"copied": False})[0])
        compare_kept(alone, [each[name]["kept"] for each in found], ROUNDING["float64"])


@pytest.mark.slow  # every start of processes takes seconds
def test_the_command_line_prints_one_answer_the_same_as_one_process(bpc, tmp_path):
    (tmp_path / "prompt.txt").write_text(tiny.prose(300))
    words = ["generate", "-m", "demo", "--dtype", "float32", "--prompt-file", tmp_path / "prompt.txt", "--budget", "8"]
    words += ["--min-tokens", "1", "--min-context", "0", "--dense-layers", "none", "--max-new-tokens", "12"]
    words += ["--temperature", "0.9"]
    two = torchrun(2, "-m", "bpc_cli", *words)
    assert two.returncode == 0, two.stderr
    assert two.stdout == bpc(*words).out
    assert two.stdout.strip()
    assert two.stderr.count("Answer: 12 tokens") == 1
    assert "Loading demo on cpu in 2 processes" in two.stderr


@pytest.mark.slow  # every start of processes takes seconds
def test_two_machines_print_one_answer(bpc, tmp_path):
    """As docs/scaling.md starts them; 127.0.0.1 stands for the first machine."""
    (tmp_path / "prompt.txt").write_text(tiny.prose(300))
    words = ["generate", "-m", "demo", "--dtype", "float32", "--prompt-file", tmp_path / "prompt.txt", "-q"]
    words += ["--budget", "8", "--min-tokens", "1", "--min-context", "0", "--dense-layers", "none"]
    words += ["--max-new-tokens", "12"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    launch += ["--master-addr", "127.0.0.1", "--master-port", str(port), "--node-rank"]
    both = [
        subprocess.Popen(
            [*launch, rank, "-m", "bpc_cli", *map(str, words)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in "01"
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [0, 0]
    assert outputs == [bpc(*words).out, ""]
    assert outputs[0].strip()


@pytest.mark.slow  # every start of processes takes seconds
def test_the_command_line_says_in_one_line_what_cannot_be_shared_out(tmp_path, model_folder):
    ran = torchrun(3, "-m", "bpc_cli", "generate", "-m", model_folder, "-p", "hello")
    assert ran.returncode
    assert our_errors(ran) == [
        "Error: tiny-llama: its 4 query heads and 2 KV heads have no equal parts for 3 processes: start 2 or 4"
    ]
    ran = torchrun(2, "-m", "bpc_cli", "generate", "-m", model_folder, "-p", "hello", "--device", "cuda:1")
    assert "Error: --device cuda:1: under torchrun each process takes" in ran.stderr
    ran = torchrun(2, "-m", "bpc_cli", "generate", "-m", model_folder)
    assert "the processes of torchrun cannot share a pipe" in " ".join(ran.stderr.replace("│", " ").split())


@pytest.mark.slow  # every start of processes takes seconds
def test_an_error_of_one_rank_alone_is_said_once(tmp_path):
    script = tmp_path / "alone.py"
    script.write_text(
        "import os, time, typer\nfrom pathlib import Path\nfrom bpc_cli.command import command\n"
        "from bpc_cli.console import fail, note\n"
        "from bpc_cli.ranks import joined_ranks, only_leader_prints\n\n@command\ndef run():\n    with joined_ranks():\n"
        "        print('result', flush=True)\n        note('a note')\n        said = Path(__file__).with_name('said')\n"
        "        if os.environ['RANK'] == '1':\n"
        "            while not said.exists():  # or torchrun ends the leader before it prints\n"
        "                time.sleep(0.1)\n            fail('it broke')\n"
        "        said.touch()\n        time.sleep(60)\n\n"
        "only_leader_prints()\ntyper.run(run)\n"
    )
    ran = torchrun(2, script)
    assert ran.returncode
    assert ran.stdout == "result\n"
    assert ran.stderr.count("a note") == 1
    assert our_errors(ran) == ["Error: it broke"]


def test_commands_that_run_in_one_process_refuse_several(tmp_path):
    script = tmp_path / "late.py"  # the process that prints is the last one to fail
    script.write_text(
        "import os, time\nif os.environ['RANK'] == '0':\n    time.sleep(2)\nfrom bpc_cli.main import main\nmain()\n"
    )
    ran = torchrun(2, script, "demo")
    assert ran.returncode
    assert ran.stdout == ""
    (line,) = our_errors(ran)
    assert line == (
        "Error: bpc demo runs in one process, and torchrun has started 2: only calibrate and generate run in several"
    )
    assert "exitcode  : 1 " in ran.stderr  # the other process may be ended by torchrun before it ends by itself


def test_every_command_says_in_how_many_processes_it_runs(bpc, monkeypatch):
    from bpc_cli.main import app

    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    names = [command.name or command.callback.__name__ for command in app.registered_commands]
    assert {"calibrate", "generate", "eval", "serve", "chat"} < set(names)
    for name in set(names) - {"calibrate", "generate"}:
        ran = bpc(name)
        assert ran.code == 1
        assert ran.err.startswith(f"Error: bpc {name} runs in one process, and torchrun has started 2: ")
    assert bpc("generate", "--help").code == 0


@pytest.mark.parametrize(
    ("total", "ranks", "first", "held"),
    [(8, 1, [0], 8), (8, 2, [0, 4], 4), (4, 4, [0, 1, 2, 3], 1), (2, 4, [0, 0, 1, 1], 1), (1, 2, [0, 0], 1)],
)
def test_the_heads_of_a_rank(total, ranks, first, held):
    assert heads_per_rank(total, ranks) == held
    assert [first_head(total, rank, ranks) for rank in range(ranks)] == first
    assert [held_heads(total, held, rank, ranks) for rank in range(ranks)] == [slice(n, n + held) for n in first]
    assert held_heads(total, total, ranks - 1, ranks) == slice(0, total)  # a model that keeps all heads everywhere


def test_calibration_needs_all_heads_in_one_process():
    model = tiny.model()
    model.config.distributed_config = tensor_parallel(model.config, 2)
    with pytest.raises(ModelError, match="2 processes shard it, and only `bpc calibrate --tensor-parallel`"):
        calibrate(model, tiny.tokenizer(), ["demo"])


def test_what_is_no_shard_of_a_rank():
    assert heads_per_rank(3, 2) is None
    assert heads_per_rank(2, 3) is None
    assert held_heads(4, 1, 0, 2) is None
    assert held_heads(4, 2, 0, 1) is None


def test_processes_are_no_part_of_what_an_artifact_is_for():
    alone, shared = tiny.config(), tiny.config()
    shared.distributed_config = tensor_parallel(shared, 2)
    assert describe(shared).ranks == 2
    assert describe(shared).metadata() == describe(alone).metadata()
    assert describe(alone).fits(shared)


def test_a_plan_is_transformers_own_unless_heads_are_copied():
    assert tensor_parallel(tiny.config(), 1).tp_size == 1
    assert tensor_parallel(tiny.config(), 2).tp_plan == "auto"
    assert tensor_parallel(tiny.config("phi3"), 4).tp_plan == "auto"  # all heads are everywhere
    plan = tensor_parallel(tiny.config(), 4).tp_plan
    assert plan["model.layers.*.self_attn.k_proj"] == "bpc_whole"
    assert plan["model.layers.*.self_attn.q_proj"] == "colwise"
    with pytest.raises(
        ModelError, match="4 query heads and 2 KV heads have no equal parts for 3 processes: start 2 or"
    ):
        tensor_parallel(tiny.config(), 3)
