"""What a rank's digest keeps of its trace."""

import pytest

from counterpoint.diagnosis.reading.operator_work import matrix_product


@pytest.mark.parametrize(
    ("shapes", "product"),
    [
        ("[[4096,1024],[1024,512]]", (4096, 512, 1024, 1)),
        ("[[512],[4096,1024],[1024,512],[],[]]", (4096, 512, 1024, 1)),  # aten::addmm: its bias is first
        ("[[2,128,64],[32,64],[]]", (256, 32, 64, 1)),  # aten::linear of two sequences: its weight is transposed
        ("[[8,16,4],[8,4,32]]", (16, 32, 4, 8)),  # aten::bmm
        ("[[4,5],[6,7]]", None),
        ("[[4,-8],[-8,2]]", None),
        ("[[4,1e3],[1e3,2]]", None),
        ("[[99999999999999999999999,8],[8,2]]", None),
        ("[" + "[2,2,2,2,2,2,2,2,2,2,2,2]," * 2 + "[]]", None),
        ("{}", None),
        ("[[4,8],[8,", None),
        ("", None),
    ],
)
def test_the_matrix_product_of_some_inputs(shapes: str, product: tuple[int, int, int, int] | None) -> None:
    """M, N, K and batch by the first two inputs that fit; nothing for what is no product."""
    assert matrix_product(shapes) == product
