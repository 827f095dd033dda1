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
