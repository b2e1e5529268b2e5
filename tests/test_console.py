"""Progress on a terminal and elsewhere, tables, estimates and one-line errors."""

import io

import pytest

from fewshot.evaluation import text as texts
from fewshot.runners.cli import compilation_cache, processor
from fewshot.runners.cli.console import one_line_errors
from fewshot.runners.cli.launch import launch
from fewshot.training import progress as progress_module


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def run_loop(stream, steps, seconds, **options):
    clock = Clock()
    progress = progress_module.Progress(1000, stream=stream, clock=clock, **options)
    for step in steps:
        clock.now += seconds
        progress.update(step, {"loss": f"{1 / step:.3f}"})
    progress.close()
    return stream.getvalue()


def test_plain_lines_come_at_intervals_and_at_the_end():
    text = run_loop(io.StringIO(), range(100, 1001, 100), 4.0)
    # 4 s a hundred: shown at once, then when 10 s have passed (12 s), then at the end; the rate since the first line.
    assert text == (
        "100/1,000 episodes  loss 0.010\n"
        "400/1,000 episodes  loss 0.003  25.0 episodes/s  24 s left\n"
        "700/1,000 episodes  loss 0.001  25.0 episodes/s  12 s left\n"
        "1,000/1,000 episodes  loss 0.001  25.0 episodes/s  0.0 s left\n"
    )


def test_a_terminal_sees_one_line_that_updates():
    text = run_loop(Terminal(), [500, 1000], 1.0)
    assert text.count("\n") == 1 and text.endswith("\n")
    assert text.split(progress_module.CLEAR_LINE)[1:] == [
        "500/1,000 episodes  loss 0.002",
        "1,000/1,000 episodes  loss 0.001  500 episodes/s  0.0 s left\n",
    ]


def test_the_line_is_cut_to_the_width_of_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    assert run_loop(Terminal(), [500], 1.0).strip("\n") == progress_module.CLEAR_LINE + "500/1,000 episodes "


def test_a_resumed_loop_counts_only_its_own_steps():
    text = run_loop(io.StringIO(), [596, 700], 1.0, done=600, interval=0)
    assert text.startswith("600/1,000 episodes  loss 0.002\n")  # never behind where it was resumed
    assert "100 episodes/s  3.0 s left" in text


def test_control_c_ends_a_command_without_a_traceback(capsys, monkeypatch):
    monkeypatch.setattr(compilation_cache, "keep_programs", lambda: None)
    monkeypatch.setattr(processor, "tune", lambda: None)

    def interrupted(config):
        raise KeyboardInterrupt

    assert launch(list, interrupted, []) == 130
    printed = capsys.readouterr()
    assert printed.err == "stopped at once; files written so far are complete\n"


def test_what_comes_before_the_first_update_is_no_part_of_the_rate():
    """Compilation, and the first validation, which training shows as an update at 0, take long and once."""
    clock, stream = Clock(), io.StringIO()
    progress = progress_module.Progress(1000, stream=stream, clock=clock, interval=0)
    clock.now += 1000
    progress.update(0, {})
    clock.now += 1
    progress.update(100, {})
    assert stream.getvalue().endswith("100/1,000 episodes  100 episodes/s  9.0 s left\n")


def test_no_rate_before_the_first_step():
    assert run_loop(io.StringIO(), [600], 1.0, done=600) == "600/1,000 episodes  loss 0.002\n"


def test_a_message_stands_on_its_own_line_and_the_progress_returns():
    stream = Terminal()
    progress = progress_module.Progress(10, stream=stream, clock=Clock())
    progress.update(1, {})
    progress.message("saved")
    progress.update(1, {})
    clear = progress_module.CLEAR_LINE
    assert stream.getvalue() == f"{clear}1/10 episodes{clear}saved\n{clear}1/10 episodes"


def test_table():
    table = texts.format_table(["", "accuracy", "ECE"], [["trained", "87.3 +- 0.6%", "0.02"], ["1-NN", "50.1%", "-"]])
    assert table.splitlines() == [
        "             accuracy   ECE",
        "-------  ------------  ----",
        "trained  87.3 +- 0.6%  0.02",
        "1-NN            50.1%     -",
    ]


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1:00"),
        (185, "3:05"),
        (7650, "2:07:30"),
    ],
)
def test_seconds(seconds, text):
    assert texts.format_seconds(seconds) == text


@pytest.mark.parametrize(
    "count, text", [(512, "512 B"), (1536, "1.5 KiB"), (3 << 20, "3 MiB"), (5 << 30, "5 GiB"), (2 << 40, "2 TiB")]
)
def test_bytes(count, text):
    assert texts.format_bytes(count) == text


def test_percent():
    assert texts.format_percent(0.8734) == "87.3%"
    assert texts.format_percent(0.8734, 0.0061) == "87.3 +- 0.6%"


def test_expected_errors_become_one_line_and_exit_code_2(capsys):
    with pytest.raises(SystemExit) as exit_info, one_line_errors(ValueError, OSError):
        raise ValueError("expected a\n  folder")
    assert exit_info.value.code == 2 and exit_info.value.__suppress_context__
    assert capsys.readouterr() == ("", "error: expected a folder\n")


def test_other_errors_keep_their_traceback():
    with pytest.raises(KeyError), one_line_errors(ValueError):
        raise KeyError("a mistake of ours")


@pytest.mark.parametrize(
    "text, shown",
    [
        ("Black_footed Albatross, é 字 🙂", "Black_footed Albatross, é 字 🙂"),
        ("\x1b[2J\x1b[31mred", r"\x1b[2J\x1b[31mred"),
        ("two\nlines\r\t\0", r"two\x0alines\x0d\x09\x00"),
        ("\x9b31m", r"\x9b31m"),  # the same escape in one byte
        ("gnp.\u202eexe", r"gnp.\u202eexe"),  # which a terminal would show as exe.png
        ("caf\udce9.png", r"caf\xe9.png"),  # a file name in Latin 1
        ("\ud800", r"\ud800"),
        (3, "3"),
    ],
)
def test_names_are_shown_as_text(text, shown):
    assert texts.plain(text) == shown
    texts.plain(text).encode()


@pytest.mark.parametrize("text", ["=1+1", "+cmd", "-a", "@SUM(A1)", "\t=1", "\r=1", "=HYPERLINK(0)"])
def test_a_formula_in_a_cell_is_text(text):
    assert texts.csv_cell(text) == "'" + text


@pytest.mark.parametrize("text", ["ash", "a=b", "-1", "+1.5", "-1e-3", "", 7, "é"])
def test_other_cells_stay_as_they_are(text):
    assert texts.csv_cell(text) == str(text)


def test_an_error_does_not_reach_the_terminal_as_a_command(capsys):
    with pytest.raises(SystemExit), one_line_errors(ValueError):
        raise ValueError("no class \x1b]0;title\x07 caf\udce9")
    assert capsys.readouterr().err == "error: no class \\x1b]0;title\\x07 caf\\xe9\n"
