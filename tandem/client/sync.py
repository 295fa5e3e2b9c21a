"""The client of `tandem.v1.Inference`, for threads.

    with Client("127.0.0.1:8001") as client:
        print(client.generate("Once upon a time", Options(max_tokens=20)).text)

Errors are those of `tandem.errors`: `param` names the wrong field, `retry_after_s` is the time after which to retry. A
stream whose connection breaks continues, at the next of the given routers, where it stopped.
"""

import time
from collections.abc import Generator, Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from tandem.client.answers import Answer, CachedContent, Model, Piece, answer_of, cached_of, timing_of, vectors_of
from tandem.client.base import ClientBase, failure_of, models_of
from tandem.client.options import DEFAULT_OPTIONS, Options, Tool, Turn
from tandem.client.requests import Prompt, chat_of, embed_request, generate_request, score_request, tokenize_request
from tandem.v1 import inference_pb2 as pb


class Client(ClientBase):
    """Channels to one cluster's routers; a context manager, which threads may share."""

    def __enter__(self) -> Self:
        self._open(grpc)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the channels and cancel running calls."""
        for channel in self._leave():
            channel.close()

    def generate(self, prompt: Prompt, options: Options = DEFAULT_OPTIONS) -> Answer:
        """Generate the whole answer to a text or to token ids. Raises ServingError."""
        return self._whole(generate_request(prompt, options), options)

    def chat(self, turns: Sequence[Turn], options: Options = DEFAULT_OPTIONS) -> Answer:
        """Generate the whole answer to a conversation. Raises ServingError."""
        return self._whole(generate_request(turns, options), options)

    def stream(self, prompt: Prompt, options: Options = DEFAULT_OPTIONS) -> Generator[Piece, None, None]:
        """Yield the answer to a text or to token ids as it is generated. Raises ServingError."""
        return self._pieces(generate_request(prompt, options), options, {})

    def stream_chat(self, turns: Sequence[Turn], options: Options = DEFAULT_OPTIONS) -> Generator[Piece, None, None]:
        """Yield the answer to a conversation as it is generated. Raises ServingError."""
        return self._pieces(generate_request(turns, options), options, {})

    def embed(
        self,
        inputs: Sequence[Prompt],
        *,
        model: str | None = None,
        cache_salt: str | None = None,
        prompt_name: str | None = None,
        dimensions: int | None = None,
    ) -> list[list[float]]:
        """Return a vector for each text, or list of token ids. Raises ServingError.

        `prompt_name`: the prompt of the model's files that stands in front of each text; `dimensions`: cut vectors.
        """
        request = embed_request(inputs, model, cache_salt, prompt_name, dimensions)
        return vectors_of(self._ask("Embed", request))

    def score(
        self,
        queries: str | Sequence[str],
        documents: Sequence[str],
        *,
        model: str | None = None,
        cache_salt: str | None = None,
    ) -> list[float]:
        """Return the relevance of each document for the query, or for the query at its place. Raises ServingError."""
        answer = self._ask("Score", score_request(queries, documents, model, cache_salt))
        return list(answer.scores)

    def tokenize(
        self,
        text: str | Sequence[Turn],
        *,
        model: str | None = None,
        add_special_tokens: bool = True,
        tools: Sequence[Tool] = (),
    ) -> list[int]:
        """Return the token ids of a text, or of a conversation with its tools. Raises ServingError."""
        answer = self._ask("Tokenize", tokenize_request(text, model, add_special_tokens, tools))
        return list(answer.token_ids)

    def detokenize(self, token_ids: Sequence[int], *, model: str | None = None) -> str:
        """Return the text of tokens, special ones included. Raises ServingError."""
        answer = self._ask("Detokenize", pb.DetokenizeRequest(model=model, token_ids=token_ids))
        return str(answer.text)

    def models(self) -> list[Model]:
        """List the models that are served. Raises ServingError."""
        return models_of(self._ask("ListModels", pb.ListModelsRequest()))

    def create_cached(
        self, turns: Sequence[Turn], *, ttl_s: float | None = None, display_name: str | None = None
    ) -> CachedContent:
        """Compute the beginning of conversations and keep it under a name. Raises ServingError."""
        request = pb.CreateCachedContentRequest(chat=chat_of(turns), ttl_s=ttl_s, display_name=display_name)
        return cached_of(self._ask("CreateCachedContent", request))

    def get_cached(self, name: str) -> CachedContent:
        """Look a kept beginning up by name. Raises CacheNotFound when there is none, or it has expired."""
        return cached_of(self._ask("GetCachedContent", pb.GetCachedContentRequest(name=name)))

    def list_cached(self) -> list[CachedContent]:
        """List the tenant's own, oldest first. Raises ServingError."""
        response = self._ask("ListCachedContents", pb.ListCachedContentsRequest())
        return [cached_of(one) for one in response.cached_contents]

    def prolong_cached(self, name: str, ttl_s: float) -> CachedContent:
        """Set the remaining lifetime to `ttl_s`. Raises as `get_cached`."""
        return cached_of(self._ask("UpdateCachedContent", pb.UpdateCachedContentRequest(name=name, ttl_s=ttl_s)))

    def delete_cached(self, name: str) -> None:
        """Release it before it expires. Raises as `get_cached`."""
        self._ask("DeleteCachedContent", pb.DeleteCachedContentRequest(name=name))

    def _ask(self, method: str, request: Any) -> Any:
        num_asked = 0
        while True:
            num_asked += 1
            try:
                return getattr(self._stub(), method)(request, metadata=self._routers.metadata)
            except grpc.RpcError as error:
                if not self._asks_next(method, error, num_asked):
                    raise failure_of(error) from None

    def _whole(self, request: pb.GenerateRequest, options: Options) -> Answer:
        timing: dict[str, Any] = {}
        pieces = [piece for piece in self._pieces(request, options, timing)]
        return answer_of(pieces, timing)

    def _pieces(
        self, request: pb.GenerateRequest, options: Options, timing: dict[str, Any]
    ) -> Generator[Piece, None, None]:
        progress, ends_s = self._begin(request, options)
        while True:
            call = self._call(progress, ends_s)
            try:
                for message in call:
                    yield progress.on_message(message)
                timing.update(timing_of(call.trailing_metadata()))
                return
            except grpc.RpcError as error:
                if progress.is_over:
                    return
                wait_s = self._wait_s(progress, error, error.trailing_metadata(), ends_s)
            finally:
                call.cancel()
            time.sleep(wait_s)
