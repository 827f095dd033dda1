"""``deepinfer chat`` with its lines from a pipe."""


def test_it_answers_each_line_and_leaves_at_exit(shell):
    talk = "Hello\n/help\n/reset\nAgain\n/exit\nnot read\n"
    done = shell("chat", "-n", "4", "-t", "0", "--ignore-eos", stdin=talk)
    assert done.code == 0
    assert "/exit ends" in done.out
    assert done.out.count("\n") >= 3


def test_it_ends_with_its_input(shell):
    assert shell("chat", "-n", "2", "--system", "Be kind", stdin="Hello\n").code == 0
    assert shell("chat", stdin="").code == 0


def test_the_same_question_after_reset_gets_the_same_answer(shell):
    few = ("-n", "8", "-t", "0", "--ignore-eos")
    once = shell("chat", *few, stdin="Hello\n").out
    twice = shell("chat", *few, stdin="Hello\n/reset\nHello\n").out
    assert twice == once * 2


def test_reasoning_is_shown_and_stays_out_of_the_conversation(capsys):
    from types import SimpleNamespace

    from deepinfer.chat import ChatMessage
    from deepinfer.cli.chat import _show

    pieces = [ChatMessage("Hm. "), ChatMessage("So", "Ye"), ChatMessage(None, "s."), ChatMessage()]
    said = [_show(SimpleNamespace(text="raw", message=piece)) for piece in pieces]
    assert "".join(said) == "Yes."
    assert capsys.readouterr().out == "Hm. SoYes."
    assert _show(SimpleNamespace(text="raw", message=None)) == "raw"
