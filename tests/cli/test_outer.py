"""Ranks that an outer launcher started: what is read from its environment."""

import pytest

from megatron_meds.cli.outer import Rank, adopt, first_host

SRUN = {
    "SLURM_JOB_ID": "4021",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NUM_TASKS": "9",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),1",
    "SLURM_STEP_NODELIST": "gpu[03-04,11]",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
}


def test_without_a_launcher_there_is_no_rank():
    assert adopt({}) is None


def test_torchrun_s_variables_are_taken_as_they_are():
    environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert adopt(environ) == Rank(rank=5, world_size=8, local_rank=1, local_world_size=4)


def test_srun_s_variables_become_those_that_torch_reads():
    environ = dict(SRUN)
    assert adopt(environ) == Rank(rank=6, world_size=9, local_rank=2, local_world_size=4)
    assert environ["MASTER_ADDR"] == "gpu03"
    assert 20000 <= int(environ["MASTER_PORT"]) < 40000


def test_every_task_of_a_step_finds_the_same_meeting_point_and_steps_differ():
    first, second, other = dict(SRUN), {**SRUN, "SLURM_PROCID": "8"}, {**SRUN, "SLURM_STEP_ID": "2"}
    for environ in (first, second, other):
        adopt(environ)
    assert first["MASTER_PORT"] == second["MASTER_PORT"] != other["MASTER_PORT"]


def test_a_meeting_point_that_is_set_stays():
    environ = {**SRUN, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5000"}
    adopt(environ)
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("10.0.0.1", "5000")


def test_a_single_srun_task_is_a_place_to_start_ranks_from():
    assert adopt({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}) is None


def test_tasks_on_one_node_meet_on_the_loopback():
    environ = {**SRUN, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0"}
    adopt(environ)
    assert environ["MASTER_ADDR"] == "127.0.0.1"


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1,2]", "n1"),
        ("gpu[003-010,12],login", "gpu003"),
        ("rack[2-4]-gpu,x", "rack2-gpu"),
    ],
)
def test_the_first_host_of_a_node_list(nodes: str, host: str):
    assert first_host(nodes) == host
