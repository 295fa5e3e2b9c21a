"""Parts of a decoder made of others: what families and adapters add to projections and embeddings, on any backend."""

from torch import Tensor

from engine.adapters.kernels import AdapterKernels
from engine.model.backend import Closing, Embedding, Projection
from engine.model.layers.norm import RowNorm
from engine.model.parallel_layers import RowParallel


class ScaledEmbedding:
    """Embeddings times a factor."""

    __slots__ = ("_embedding", "_factor")

    def __init__(self, embedding: Embedding, factor: float) -> None:
        self._embedding = embedding
        self._factor = factor

    @property
    def nbytes(self) -> int:
        return self._embedding.nbytes

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self._embedding(token_ids).mul_(self._factor)


class NormedQKV:
    """The projection to queries, keys and values, the first two normed beyond single heads or with weights by head."""

    __slots__ = ("_key_norm", "_projection", "_queries_end", "_query_norm", "_rotated_end")

    def __init__(
        self, projection: Projection, query_norm: RowNorm, key_norm: RowNorm, *, query_size: int, key_size: int
    ) -> None:
        """`query_size`, `key_size`: columns of each in the projection's result."""
        self._projection = projection
        self._query_norm = query_norm
        self._key_norm = key_norm
        self._queries_end = query_size
        self._rotated_end = query_size + key_size

    @property
    def nbytes(self) -> int:
        return self._projection.nbytes + self._query_norm.nbytes + self._key_norm.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        qkv = self._projection(x)
        self._query_norm.apply_(qkv[:, : self._queries_end])
        self._key_norm.apply_(qkv[:, self._queries_end : self._rotated_end])
        return qkv


class NormedClosing:
    """A projection that closes a block, and a norm of its result, which the norm that follows adds."""

    __slots__ = ("_norm", "_projection")

    def __init__(self, projection: RowParallel, norm: RowNorm) -> None:
        self._projection = projection
        self._norm = norm

    @property
    def nbytes(self) -> int:
        return self._projection.nbytes + self._norm.nbytes

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        return self._norm.apply_(self._projection(x, residual))


class SoftCappedHead:
    """An output head with bounded logits, in plain torch."""

    __slots__ = ("_cap", "_head")

    def __init__(self, head: Projection, cap: float) -> None:
        self._head = head
        self._cap = cap

    @property
    def nbytes(self) -> int:
        return self._head.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._head(x).div_(self._cap).tanh_().mul_(self._cap)


class AdaptedProjection:
    """A projection, and what adapters add to its result."""

    __slots__ = ("_adapters", "_projection", "_site")

    def __init__(self, projection: Projection, adapters: AdapterKernels, site: int) -> None:
        """`site`: see `engine.adapters.packing.site_number`."""
        self._projection = projection
        self._adapters = adapters
        self._site = site

    @property
    def nbytes(self) -> int:
        """Memory of the projection's own weights."""
        return self._projection.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        out = self._projection(x)
        self._adapters.add_(self._site, x, out)
        return out


class AdaptedClosing:
    """A projection that closes a block, and what adapters add to its result or to the residual stream."""

    __slots__ = ("_adapters", "_closing", "_site")

    def __init__(self, closing: Closing, adapters: AdapterKernels, site: int) -> None:
        """`site`: see `engine.adapters.packing.site_number`."""
        self._closing = closing
        self._adapters = adapters
        self._site = site

    @property
    def nbytes(self) -> int:
        """Memory of the projection's own weights."""
        return self._closing.nbytes

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor | None:
        product = self._closing(x, residual)
        self._adapters.add_(self._site, x, residual if product is None else product)
        return product
