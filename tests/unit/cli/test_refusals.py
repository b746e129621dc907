"""Wrong words: one sentence on stderr, in one style, with what to do, and exit code 2."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from thinwire.core.pricing.costs import Costs, Linear
from thinwire.core.pricing.profiles import ModelProfile, builtin
from verbs import call

RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OWN = """import torch
DATA = {}

def build(width=3):
    return DATA["weights"]

def loses():
    return torch.nn.Linear(2, 2), lambda model, step, rank: DATA["x"]

def refuses():
    raise ValueError("width must be even")

def a_tensor_for_a_loss():
    return torch.nn.Linear(2, 2), torch.ones(2)

def nothing():
    pass

def loader(size=4, **options):
    data = torch.utils.data.TensorDataset(torch.ones(size, 2), torch.ones(size, 2))
    return torch.utils.data.DataLoader(data, 2, **options)

def empty():
    return torch.nn.Linear(2, 2), loader(1, drop_last=True)

def empty_stream():
    return torch.nn.Linear(2, 2), lambda rank, workers: iter(())

def two_inputs():
    return torch.nn.Linear(2, 2), loader()

def no_scalar():
    return torch.nn.Linear(2, 2), loader(), lambda model, batch: model(batch[0])

def no_loss():
    return torch.nn.Linear(2, 2), [torch.ones(3, 2)]

def a_data_set():
    return torch.nn.Linear(2, 2), loader().dataset

def read_once():
    return torch.nn.Linear(2, 2), iter(loader())

def a_loader_for_a_loss():
    return torch.nn.Linear(2, 2), loader(), loader()

def misspelt():
    return {"model": torch.nn.Linear(2, 2), "data": loader(), "heldout": loader()}

def nothing_to_train():
    return torch.nn.ReLU(), lambda model, step, rank: torch.ones(())

network = torch.nn.Linear(2, 2)

def flat():
    return torch.nn.Embedding(3, 2), lambda model, step, rank: model(torch.tensor([1])).sum()
"""
REFUSED = """
--nope -> error: no such option
bnch -> Did you mean 'bench'
race ->  race --help)
ps node -> error: missing option '--server' (see
bench --steps x -> '--steps'
plan resnet50 gpt2 -> gpt2
bench --link 1furlong -> furlong
bench --workers 0 -> at least 1
bench --steps 0 -> at least 1
bench --plot a.gif -> .png, .svg or .html
bench --plot new/a.png -> folder that exists
bench --operation-timeout nan -> time-outs must be positive
bench --methods ddp:bucket=x -> bucket='x' must be a size in MB
bench --methods ddp-best:buckets=nan -> must be sizes in MB
bench --methods torch-powersgd:rank=0 -> rank=0 must be a whole number
bench --methods auto:lossy=maybe -> lossy=true
bench --methods atuo -> did you mean 'auto'
bench --methods '' -> no methods
bench --methods ddp-bset -> did you mean 'ddp-best'
bench --methods ddp:rank=3 -> no option 'rank'
bench --methods acp:rank -> unknown method
bench --methods acp:rank=4:8 -> '8' is not an option
plan gpt2 --link 1gbit --methods acp:rank=1:rank=2 -> names rank twice
bench --methods local:sync_every=0 -> sync_every=0
bench --methods local:schedule=dream -> unknown option of local: 'schedule'
bench --methods diloco:period=3 -> unknown option of diloco: 'period'
bench --methods ddp-best:buckets=a/b -> sizes in MB
bench --methods ddp-best:buckets=0 -> sizes in MB
bench --methods thinwire.tools.bench.rows:nothing -> row 'thinwire.tools.bench.rows:nothing' cannot be loaded
bench --methods thinwire.tools.bench.rows:COMPUTE -> is not a function
bench --model own_syntax:build -> model 'own_syntax:build' cannot be loaded: own_syntax.py, line 2: SyntaxError:
bench --model own.py:build -> is a file: write own:build
demo --steps 0 -> at least 1
doctor --nodes 0 -> at least 1
doctor --read nowhere.json -> No such file
doctor --read own.py -> the output of `thinwire doctor --json`
probe --workers 0 -> at least 1
probe --workers 3 --ranks-per-node 2 -> multiple
probe --max-bytes 100 -> at least 8192
probe --max-bytes 99999999999999999999 -> and at most 68719476736
probe --seconds 0 -> --seconds=0.0 must be a finite number and above 0
probe --backend mpi -> use one of auto, gloo, nccl
probe --backend nccl -> torchrun
probe --out nowhere/costs.json -> folder that exists
profile chargtp -> did you mean 'chargpt'
profile mlp:depth=3 -> no option 'depth'
profile mlp:width= -> is not an option
profile chargpt:width=100:heads=3 -> not a multiple
profile mlp --steps 0 -> at least 1
profile mlp --workers 0 -> at least 1
profile mlp --out nowhere/profile.json -> folder that exists
profile own_raises:build -> cannot be loaded: own_raises.py, line 1: ZeroDivisionError: division by zero
profile own:build -> line 5: KeyError: 'weights'
profile own:loses -> line 8: KeyError: 'x'
profile own:refuses -> line 11: ValueError: width must be even
profile own:build:width=2:depth=3 -> no option 'depth'
profile own:a_tensor_for_a_loss -> its data must be a DataLoader, a list of batches, or a function (rank, workers)
profile own:nothing -> must return (model, DataLoader), (model, DataLoader, loss) with loss(model, batch) -> Tensor, or
profile own:nothing -> not None
profile own:loader -> not DataLoader
profile own:empty -> its data gives not a single batch
profile own:empty_stream -> its data gives not a single batch
profile own:two_inputs -> the model cannot be called with a batch, too many positional arguments: return a function (mo
profile own:no_scalar -> the loss must be a tensor of one number, not a tensor of shape (2, 2)
profile own:no_loss -> the model's output is no loss but a tensor of shape (3, 2): return a function (model, batch)
profile own:a_data_set -> not TensorDataset
profile own:read_once -> its data can be read only once
profile own:a_loader_for_a_loss -> its loss must be a function (model, batch), not DataLoader
profile own:misspelt -> returns 'heldout'; did you mean 'held_out'?
profile own:nothing_to_train -> has no parameter to train
profile own:network -> is a module, not a function
plan -> give a model
plan resnet50:batch=2 -> has no options: use --batch-size
plan resnet50 --link 1gbit,100mbit -> all links have the same one: give the slowest
plan resnet50 --link '' -> is not a number
plan resnet50 --link \u0661gbit -> is not a number
plan resnet50 --methods lcoal -> did you mean 'local'
plan resnet50 --methods topk:decoupled=true -> cannot be decoupled
plan resnet50 --methods ssdg -> did you mean 'ssgd'
plan resnet50 --methods topk -> needs density
plan resnet50 --methods , -> no methods given
plan resnet50 --methods acp,acp -> twice
plan resnet5 -> did you mean 'resnet50'
plan resnet50 --delay soon -> soon
plan resnet50 --costs nowhere.json -> nowhere.json cannot be read: No such file
plan resnet50 --costs . -> cannot be read
plan resnet50 --costs bad.json -> not a file of thinwire costs
plan resnet50 --costs empty.json -> no exchange between ranks
plan resnet50 --costs costs.json --delay 1ms -> --delay
plan resnet50 --costs deep.json -> deep.json: this is not a file of thinwire costs: maximum recursion
plan resnet50 --worth bad.json -> bad.json holds no table of steps to a loss as written by thinwire race
plan nowhere.json -> nowhere.json cannot be read: No such file
plan bad.json -> not a thinwire profile
plan binary.json -> not a text file
plan list.json -> list.json: this is not a thinwire profile: [] is not the fields of a ModelProfile
plan huge.json -> huge.json: this is not a thinwire profile
plan no_tensors.json -> no_tensors.json: the profile contains no gradients
plan odd.json -> of 1 bytes
plan saved.json --batch-size 8 -> --batch-size is for the built-in models
plan saved.json --device-flops 1e12 -> --device-flops is for the built-in models
plan vgg16 --profile saved.json -> not of 'vgg16'
plan resnet50 --workers 0 -> --workers=0 must be
plan resnet50 --workers 1000000000 -> at most 65536
plan resnet50 --workers 5 --ranks-per-node 2 -> not a multiple
plan resnet50 --ranks-per-node 0 -> --ranks-per-node=0
plan resnet50 --device a10 -> did you mean 'a100'
plan resnet50 --device-flops 0 -> device_flops
plan resnet50 --batch-size 0 -> batch_size
plan resnet50 --trace nowhere/trace.json -> --trace nowhere/trace.json
plan resnet50 --out . -> --out .
plan resnet50 --memory --out a.json -> --memory only counts: leave out --out
plan resnet50 --memory --link 1gbit --map -> --memory only counts: leave out --link, --map
plan resnet50 --memory --speeds 1,0.5 -> --memory only counts: leave out --speeds
plan resnet50 --speeds 1,0.5 --map --explain -> --speeds ranks machines that differ: leave out --map, --explain
plan resnet50 --speeds 1,half -> --speeds '1,half': give 2 speeds above 0
plan resnet50 --speeds 0.9,0.5 -> of which the fastest is 1
plan resnet50 --speeds 1,2 -> of which the fastest is 1
plan resnet50 --speeds 1,0 -> above 0
plan resnet50 --speeds '' -> give 1 speed above 0
plan resnet50 --workers 4 --speeds 1,0.5 -> --speeds '1,0.5': give 4 speeds above 0
plan resnet50 --speeds 1,0.5 --ranks-per-node 2 -> the 2 ranks of a machine must have the same speed
plan resnet50 --shards 4 --dtype bf16 -> --shards, --dtype: these belong to --memory
plan chargpt:layers=abc -> layers='abc' must be a whole number of at least 1
plan chargpt:fused=3 -> fused=3 must be true or false
plan chargpt:lr=nan -> lr='nan' must be a number above 0
race chargpt --methods acp,acp -> given twice
race chargpt --workers 1 -> --workers 1: a race needs at least 2
race chargpt --minutes 0 -> --minutes 0 must be above 0
race chargpt --seeds 0 -> --seeds 0 must be at least 1
race chargpt --workers 2 --speeds 1,1,0.5 -> --speeds '1,1,0.5': give
race chargpt --steps 50 -> --steps 50: a run has at least 100 steps
race chargpt --steps 200 --schedule linear -> --schedule
race chargpt --methods accumulate:every=1 -> accumulate: every=1 must be a whole number of at least 2
race chargpt --methods ssgd:look=far -> look='far' must be a thinwire.Look
race chargpt --methods local:look=2 -> Look: beta
race chargpt --out own.py -> --out own.py is not a folder that can be written (Not a directory)
race chargpt --out own.py/results -> --out own.py/results is not a folder that can be written
race chargpt --out /proc/results -> --out /proc/results is not a folder that can be written (
report nowhere.json -> is not a file
report saved.json --out nowhere/report.html -> folder that exists
report saved.json --out saved.json -> one of the files
report saved.json -> saved.json contains nothing that a report can show
watch no/such/steps.jsonl -> none can be created there
watch a.jsonl --port 70000 -> leave it out
lab run --workers 3 --ranks-per-node 2 -- true -> not a multiple
lab run --link 1gb -- true -> link rate '1gb'
lab run --workers 4 --link 1gbit,1gbit -- true -> 2 links for 4 nodes
lab run --delay x -- true -> delay 'x'
lab run --loss 150% -- true -> loss '150%'
lab run --delay 1ms --jitter 2ms -- true -> jitter of 2ms is outside 0 to the delay, 1ms
lab run --congestion foo -- true -> congestion control 'foo' is unknown
bench --loss 150% -> loss '150%'
race mlp --link 1mbit --jitter 2ms -> give a delay too
ps run --updates 1 --congestion foo -> congestion control 'foo' is unknown
lab run --master-port 70000 -- true -> master port 70000
lab run --grace -1 -- true -> grace must not be negative
lab run --timeout nan -- true -> the timeout must be positive
lab run -> no command to run
lab run -- no-such-command -> command 'no-such-command' does not exist
lab run -- / -> command '/' does not exist or cannot
lab run -- python -X dev -u no_such_script.py --lr 1 -> script 'no_such_script.py' does not
lab run --kill 5:1s -- true -> --kill names rank 5, but the ranks are 0 to 1
lab run --kill 1 -- true -> --kill '1' is not RANK:AT: use for example --kill 2:30s
lab run --kill 1:0s -- true -> '0s' is not a time above 0 in ms, s or m
lab run --restart 5s -- true -> say which rank with --kill
lab run --kill 1:1s --restart 5 -- true -> --restart '5': '5' is not a time
lab run --stop 1:3s -- true -> --stop '1:3s' is not RANK:AT:FOR
lab run --kill 1:1s --kill 1:3s -- true -> killed from 1 s for good (--restart S brings it back)
lab run --kill 1:1s --restart 4s --stop 1:3s:1s -- true -> killed from 1 s until 5 s
lab run --slow 2:2 -- true -> there are ranks 0 to 1
lab run --slow 1:2x -- true -> '1:2x' is not RANK:NUMBER; use for example --slow 3:2
lab run --slow 0:2,1:0.5 -- true -> --slow 1:0.5 needs a rank of 0 to 1, and at least 1 times
lab run --slow 1:2 --stop 1:1s:1s -- true -> --stop and --slow both stop rank 1
lab run --cut 1:1s:1s -- true -> --cut needs emulated links
kfac plan -> give a model
kfac plan resnet50 --schedules fast -> schedule='fast' is unknown
kfac plan resnet50 --schedules '' -> --schedules '': give schedules separated by commas
kfac plan resnet50 --schedules kaisa:1/0 -> schedule='kaisa:1/0' is unknown
kfac calibrate --costs binary.json -> binary.json cannot be read: not a text file
kfac calibrate --costs bad.json -> bad.json: this is not a file of thinwire costs
kfac plan resnet50 --factor-update-steps 0 -> --factor-update-steps=0 must be a whole number of at least 1
kfac plan resnet50 --workers 6 --schedules kaisa:1/4 -> use kaisa:1/6, kaisa:2/6
kfac plan resnet50 --out no/such/plan.json -> --out
kfac calibrate --device gpu -> --device gpu must be cpu or cuda
kfac calibrate --seconds 0 -> --seconds=0.0 must be
kfac calibrate --largest 0 -> largest=0
kfac tune --dampings 0,1 -> --dampings '0,1': give numbers above 0
kfac tune --rates fast -> --rates 'fast'
kfac tune --steps 0 -> --steps=0 must be a whole number of at least 1
kfac tune --method lu -> method='lu' is unknown
kfac tune --plot x.pdf -> must end in .png, .svg or .html
kfac tune own:flat -> no trainable Linear or Conv2d layer
federated run digits --rounds 0 ->
federated run digits --devices 0 ->
federated run digits --schedule nope -> unknown; use one of
federated run digits --schedule equl -> did you mean 'equal'? use one of
federated run digitz -> did you mean 'digits'? known:
federated run digits --algorithm fedavgg -> did you mean 'fedavg'? known:
federated run digits --reduction nope ->
federated run digits --checkpoint-dir /proc/x ->
federated run digits --clients-per-round 9999 ->
supernet train --out r --size 48 -> height x width
supernet train --out r --size 50x96 -> pad them to 54x96
supernet train --out r --config huge -> use one of tiny, published
supernet train --out r --data nowhere.txt -> is unknown; use one of dots, planes, scenes, or a file
supernet train --out r --data scnes -> did you mean 'scenes'? use one of
reproduce acpp -> did you mean 'acp'? there are omgs
split plan --kind lowrnk -> did you mean 'lowrank'? use one of
split plan --task sst -> did you mean 'sst2'? use one of stdlib
supernet train --out r --steps many -> --steps
supernet train --out r --epoch 3 -> --epoch
supernet train --out r --method topk -> density
supernet train --out r --max-disparity 60 -> below 48
supernet train --out r --elastic-refinement -> published
supernet search net.pt --limit-ms 10 -> there is no file
supernet search net.pt --limit-ms -1 -> above 0
supernet table --config huge -> use one of tiny, published
supernet export net.pt --out x.pt2 -> search calibrated.pt
ps simulate --settings inhat -> preset 'inhat' is unknown; did you mean 'inhad'? use one of
ps simulate --settings inhad:limit -> preset 'inhad:limit' is unknown; did you mean 'inhad'?
ps simulate --settings inhad:max_staleness=-1 -> max_staleness=-1 must be a whole number of at least 0
ps simulate --settings inhad:max_stalenes=3 -> did you mean 'max_staleness'? known:
ps simulate --slow 9:4 -> there are nodes 0 to 3
ps simulate --slow much -> use for example --slow 1:4
ps simulate --step 0 -> --step=0.0 must be a finite number and above 0
ps simulate --step nan -> --step=nan must be a finite number
ps simulate --workers 0 -> --workers=0 must be a whole number of at least 1
ps simulate --link fast -> link rate
ps simulate --shards -2 -> --shards=-2
ps simulate --spread 1e99 -> --spread=1e+99 must be a finite number and at least 0 and at most 10
ps simulate --seconds inf -> --seconds=inf must be
ps server -> say when to end
ps server --updates 3 --model mlp:width=16 --port 99999 -> port=99999 must be a whole number
ps server --updates 3 --journal /proc/x -> --journal /proc/x is not a file that can be written
ps server --updates 3 --checkpoint-dir /proc/x -> --checkpoint-dir /proc/x is not a folder that can be written
ps server --updates 3 --outer sgdd -> unknown optimizer
ps server --updates 3 --model nomodel -> unknown model
ps server --updates 3 --shards -1 -> --shards=-1 must be a whole number of at least 0
ps server --updates 3 --model digits --shards 99999999 -> at most the model's
ps run --updates 0 -> --updates=0 must be a whole number of at least 1
ps run --seconds nan -> --seconds=nan must be a finite number and above 0
ps run --seconds 1 --workers 0 -> --workers=0 must be
ps run --seconds 1 --pace nan -> --pace=nan must be a finite number
ps run --seconds 1 --evaluate-every 0 -> --evaluate-every=0 must be
ps run --seconds 1 --journal /proc/x -> --journal /proc/x is not a file that can be written
ps run --updates 3 --nodes 2 --shards 1 --keys none -> run thinwire keys new none --names server,shard0,node0,node1
ps node --server somewhere -> host:port
ps node --server nowhere.invalid:1 -> the name 'nowhere.invalid' has no address
ps node --server 127.0.0.1:1 --pace -1 -> --pace=-1.0 must be
ps node --server 127.0.0.1:1 --slowdown nan -> --slowdown=nan must be
ps node --server 127.0.0.1:1 --node -1 -> --node=-1 must be
ps shard somewhere --index 0 -> host:port
ps shard 127.0.0.1:1 --index -1 -> --index=-1 must be a whole number of at least 0
split plan --model bart -> model 'bart' is unknown
split plan --model bert:colour=1 -> model option='colour' is unknown
split plan --task x -> --task='x' is unknown
split plan --task cola -> needs --data
split plan --cut 9 -> cut=9 is outside 1 to 4
split compare --cut 9 -> cut=9 is outside 1 to 2
split plan --model bert:heads=3 -> must be a multiple of heads=3
split plan --length 2 -> --length=2 must be a whole number of at least 3
split plan --up int7 -> codec 'int7' is unknown
split plan --link fast -> link rate 'fast'
split plan --model vit-small -> text tasks: split a ViT from Python
split compare --plans '' -> --plans is empty
split compare --plans thin -> kind='thin' is unknown
split compare --seeds 0 -> --seeds=0 must be a whole number of at least 1
split plan --front-on cloud --labels cloud -> cannot be used with front_on='cloud'
split compare --front-on x -> front_on='x' is unknown
split cloud nowhere.safetensors -> is not a half of a model
split edge nowhere.safetensors -> is not a half of a model
federated run digit -> unknown federation 'digit'; did you mean 'digits'?
federated run digits:client=3 -> has no option 'client'; did you mean 'clients'?
federated run digits:clients=abc -> clients='abc' must be a whole number of at least 1
federated run digits:clients=-3 -> clients=-3 must be a whole number of at least 1
federated run own:build -> own.py, line 5: KeyError: 'weights'
federated run digits --trace deep.json -> deep.json
federated run digits --algorithm fedprox:nu=1 -> fedprox has no option 'nu'
federated run digits --algorithm adam -> unknown algorithm 'adam'
federated run digits --compress topp -> unknown method
federated run digits --clients-per-round 0 -> clients_per_round=0
federated run digits --schedule best -> 'best' is unknown
federated run digits --plot x.pdf -> must end in .png, .svg or .html
federated run digits --trace none.json -> none.json cannot be read
federated run digits --threads 0 -> --threads=0
federated run digits --state-memory -1 --algorithm scaffold -> memory_bytes=-1
federated run nowhere:build -> cannot be loaded
federated run own:nothing -> must return a thinwire.systems.federated.Federation, not NoneType
federated predict --mean 0 -> --mean=0.0 must be a finite number and above 0
federated predict --fast 0 --slow 0 -> devices=0
federated predict --devices none.json -> cannot be read
federated predict --rounds 0 -> rounds=0 must be a whole number of at least 1
ps replay nothing.jsonl -> nothing.jsonl is not a file
"""
UNWRITABLE = """
demo --quick
race mlp
plan resnet50
profile mlp
probe
kfac plan resnet50
kfac calibrate
federated run digits
supernet train
supernet table
split plan
"""  # even root may not write into /proc


def saved(path, **more):
    costs = Costs.of_link(1e9, 1e-4, 4, 2)
    exchanges = {k: Linear(c.startup_seconds, c.seconds_per_byte, "measured here") for k, c in costs.exchanges.items()}
    path.write_text(Costs(exchanges, **more).to_json())


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder of damaged files, and of a user's own."""
    folder = tmp_path_factory.mktemp("refusals")
    profile = builtin("resnet50")
    saved(folder / "costs.json")
    texts = {
        "own.py": OWN,
        "own_syntax.py": "import torch\ndef build(:\n    pass\n",
        "own_raises.py": "1 / 0\n",
        "deep.json": "[" * 100_000,
        "bad.json": "{}",
        "list.json": "[]",
        "huge.json": profile.to_json().replace('"dtype_bytes": 4', '"dtype_bytes": 1e999'),
        "no_tensors.json": ModelProfile("none", (), 1.0).to_json(),
        "odd.json": ModelProfile("odd", profile.tensors, 1.0, dtype_bytes=1).to_json(),
        "empty.json": Costs({}).to_json(),
        "saved.json": profile.to_json(),
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "binary.json").write_bytes(b"\xff\xfe\x00\x80")
    return folder


@pytest.fixture(autouse=True)
def among_them(files, here, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    monkeypatch.chdir(files)


def refused(words, code=2):
    """What is said in the last line, behind what long verbs say first that they begin."""
    result = call(*words, code=code)
    assert "Traceback" not in result.output
    assert result.stdout == "" or words[0] == "race"
    *begun, last = result.stderr.strip().splitlines()
    assert not [line for line in begun if line.startswith("error")]
    assert last.startswith("error: ")
    return last


@pytest.mark.parametrize("row", REFUSED.strip().splitlines())
def test_wrong_words_are_one_sentence_and_exit_2(row):
    words, _, says = row.partition(" -> ")
    words = [sys.executable if word == "python" else word for word in shlex.split(words.removesuffix(" ->"))]
    assert says in refused(words)


@pytest.mark.parametrize("verb", UNWRITABLE.strip().splitlines())
def test_an_output_that_cannot_be_written_is_told_before_the_work(verb):
    said = refused([*verb.split(), "--out", "/proc/x"])
    assert said.startswith("error: --out /proc/x ")
    assert "can be written" in said


@pytest.mark.parametrize("verb", ["bench", "federated run", "kfac tune", "split compare", "ps run --updates 1"])
def test_a_plot_that_cannot_be_written_is_told_before_the_work(verb):
    said = refused([*verb.split(), "--plot", "/proc/x.png"])
    assert said.startswith("error: --plot /proc/x.png is not a file that can be written")


@pytest.mark.parametrize("words", [["probe", "--workers", "3"], ["profile", "mlp"]])
def test_words_that_do_not_go_with_torchrun(words, monkeypatch):
    for name, value in zip(RANKS, ("0", "2", "0", "2")):
        monkeypatch.setenv(name, value)
    assert "torchrun" in refused(words)


@pytest.mark.parametrize("inside", [True, False])
def test_a_model_that_reads_its_own_arguments_gets_none_of_ours(tmp_path, inside, monkeypatch):
    """It takes its defaults; one that needs an argument is told of by its place, and not by our exit code alone."""
    monkeypatch.chdir(tmp_path)
    read = "parser = argparse.ArgumentParser()\nparser.add_argument('--size', type=int, {})\n"
    read += "size = parser.parse_args().size\n"
    for name, option in (("default", "default=2"), ("needed", "required=True")):
        lines = read.format(option)
        rest = "return torch.nn.Linear(size, 2), lambda model, step, rank: missing\n"
        if inside:
            text = "def build():\n" + "".join(f"    {line}\n" for line in (*lines.splitlines(), rest))
        else:
            text = f"{lines}def build():\n    {rest}"
        Path(f"racer_{name}_{inside}.py").write_text(f"import argparse, torch\n{text}")
    assert "NameError" in refused(["race", f"racer_default_{inside}:build", "--minutes", "1"])
    last = refused(["race", f"racer_needed_{inside}:build", "--minutes", "1"])
    assert last.startswith("error: model ")
    assert f"racer_needed_{inside}.py, line " in last
    assert last.endswith("RuntimeError: it called sys.exit(2)")


def test_what_a_model_prints_does_not_mix_with_json(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "import torch\nprint('hello')\ndef build():\n    print('hello')\n    return torch.nn.Linear(2, 2), loss\n"
    text += "def loss(model, step, rank):\n    print('hello')\n    return missing\n"
    Path("racer_that_prints.py").write_text(text)
    result = call("race", "racer_that_prints:build", "--json", code=2)
    assert "the loss of 'racer_that_prints:build' failed: racer_that_prints.py, line 8: NameError" in result.stderr
    assert result.stderr.count("hello") == 3
    assert result.stdout == ""


def test_what_cannot_be_raced_is_told_before_ranks_start(monkeypatch):
    assert "training two of them " in refused(["race", "mlp:width=64", "--minutes", "0.0001"], 1)
    assert "links cannot be emulated here" in refused(["race", "chargpt", "--link", "100mbit"], 1)
    monkeypatch.setattr("thinwire.tools.lab.available", lambda: "root")
    said = refused(["race", "mlp:width=64", "--minutes", "0.01", "--link", "100kbit"], 1)
    assert "timing 9 methods takes " in said
    assert "give --minutes " in said


def test_a_torch_that_cannot_be_imported_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "torch cannot be imported" in refused(["doctor"], 1)


def test_without_plotly_a_report_says_what_to_install(monkeypatch, tmp_path):
    picture = {"title": "it fell", "panels": [{"x": "step", "y": "loss", "lines": [{"name": "a", "x": [1], "y": [2]}]}]}
    (tmp_path / "run.json").write_text(json.dumps({"picture": picture}))
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.delitem(sys.modules, "plotly.graph_objects", raising=False)
    assert "pip install 'thinwire[report]'" in refused(["report", str(tmp_path / "run.json")])
