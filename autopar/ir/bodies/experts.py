"""Mixtures of experts without dropped tokens: rows of all tokens for all experts; those of chosen experts carry data.

`rows_EBSd[e]` holds the tokens at their own positions, and zeros where a token did not choose expert e. So any number
of tokens may choose an expert, every shape is static, and experts, samples, positions and widths are dims that can be
split. Kernels hold and multiply the chosen rows only: attribute `fill` is their share, `top_k / E` of a balanced load.
It changes no number; costs read it (`autopar.ir.fills`), and so they do `groups` of experts, of which a token chooses
`chosen_groups` (`autopar.ir.routing`).

`ExpertRows` stands between a dispatch and the experts, and between these and the combination: rows that go to other
devices go there once, and forward and backward read them where they arrived, as frameworks keep them.

Names: E experts, B samples, S positions, K choices of a token, d and f widths; `numbers_E` are the numbers of the
experts (0, 1, 2, ...), a shard of which stands for a shard of the experts.
"""


def _choices(like: str, *, once: bool = False) -> str:
    """Return lines that say in the type of `like` which choice is which expert, and, with `once`, who is chosen."""
    lines = f"""    last = Constant <value_ints = [-1]> ()
    expert_BSK1 = Unsqueeze (expert_BSK, last)
    expert_like = CastLike (expert_BSK1, numbers_E)
    is_chosen = Equal (expert_like, numbers_E)
    chosen_BSKE = CastLike (is_chosen, {like})"""
    if not once:
        return lines
    return f"""{lines}
    choice = Constant <value_ints = [2]> ()
    chosen_BSE = ReduceMax <keepdims = 0> (chosen_BSKE, choice)"""


_GROUPS = "groups: int = 1, chosen_groups: int = 1"

EXPERTS = f"""
ExpertDispatch <fill: float = 1.0, {_GROUPS}> (x_BSd, expert_BSK, numbers_E) => (rows_EBSd)
{{
{_choices("x_BSd", once=True)}
    chosen_EBS = Transpose <perm = [2, 0, 1]> (chosen_BSE)
    chosen_EBS1 = Unsqueeze (chosen_EBS, last)
    rows_EBSd = Mul (chosen_EBS1, x_BSd)
}}

ExpertRows (rows_EBSd) => (held_EBSd)
{{
    held_EBSd = Identity (rows_EBSd)
}}

ExpertSum <fill: float = 1.0, {_GROUPS}> (rows_EBSd, expert_BSK, numbers_E) => (y_BSd)
{{
{_choices("rows_EBSd", once=True)}
    y_BSd = Einsum <equation = "bse,ebsd->bsd"> (chosen_BSE, rows_EBSd)
}}

ExpertCombine <fill: float = 1.0> (rows_EBSd, weight_BSK, expert_BSK, numbers_E) => (y_BSd)
{{
{_choices("rows_EBSd")}
    weight_BSE = Einsum <equation = "bsk,bske->bse"> (weight_BSK, chosen_BSKE)
    y_BSd = Einsum <equation = "bse,ebsd->bsd"> (weight_BSE, rows_EBSd)
}}

ExpertCombineGrad <fill: float = 1.0> (rows_EBSd, w_BSK, expert_BSK, numbers_E, dy_BSd) => (drows_EBSd, dw_BSK)
{{
{_choices("rows_EBSd")}
    weight_EBS = Einsum <equation = "bsk,bske->ebs"> (w_BSK, chosen_BSKE)
    weight_EBS1 = Unsqueeze (weight_EBS, last)
    drows_EBSd = Mul (weight_EBS1, dy_BSd)
    product_BSE = Einsum <equation = "ebsd,bsd->bse"> (rows_EBSd, dy_BSd)
    dw_BSK = Einsum <equation = "bske,bse->bsk"> (chosen_BSKE, product_BSE)
}}

GroupedMatMul <fill: float = 1.0> (rows_EBSd, w_Edf) => (y_EBSf)
{{
    samples = Constant <value_ints = [1]> ()
    w_E1df = Unsqueeze (w_Edf, samples)
    y_EBSf = MatMul (rows_EBSd, w_E1df)
}}

GroupedMatMulGrad <fill: float = 1.0> (dy_EBSf, w_Edf) => (drows_EBSd)
{{
    samples = Constant <value_ints = [1]> ()
    w_Efd = Transpose <perm = [0, 2, 1]> (w_Edf)
    w_E1fd = Unsqueeze (w_Efd, samples)
    drows_EBSd = MatMul (dy_EBSf, w_E1fd)
}}

GroupedMatMulWeightGrad <fill: float = 1.0> (rows_EBSd, dy_EBSf) => (dw_Edf)
{{
    samples = Constant <value_ints = [1]> ()
    rows_EBdS = Transpose <perm = [0, 1, 3, 2]> (rows_EBSd)
    dw_EBdf = MatMul (rows_EBdS, dy_EBSf)
    dw_Edf = ReduceSum <keepdims = 0> (dw_EBdf, samples)
}}
"""
