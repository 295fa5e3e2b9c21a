"""What sentence-transformers itself makes of a model directory, against the HTTP API that serves the same directory.

Run by an interpreter that has that package; the directory is random, small, and has one of each file.
"""

import json
import os
import sys
import urllib.request

import numpy as np
import sentence_transformers

MODEL = os.environ["TANDEM_MODEL"]
STORY = "The fox sat by the river and waited for the heron to come back from the hills. "
TEXTS = ["A fox.", STORY, STORY * 9, STORY * 9 + "It rained.", " An owl, two owls\n"]


def post(path: str, **body) -> dict:
    """Answer of the cluster."""
    request = urllib.request.Request(  # the cluster's own address
        os.environ["TANDEM_URL"] + path,
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['TANDEM_KEY']}"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def agree(found: np.ndarray, expected: np.ndarray) -> None:
    """Numbers are the same, and vectors point the same way."""
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)
    if expected.ndim == 2:
        cosines = (found * expected).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(expected, axis=1)
        assert (1 - cosines).max() <= 1e-5, cosines


def embeddings() -> None:
    """Vectors with and without prompts, cut, and the cosines of a query."""
    model = sentence_transformers.SentenceTransformer(MODEL, device="cpu")

    def ask(**more) -> np.ndarray:
        return np.array([one["embedding"] for one in post("/v1/embeddings", input=TEXTS, **more)["data"]])

    agree(ask(), model.encode(TEXTS))
    agree(ask(prompt_name="query"), model.encode(TEXTS, prompt_name="query"))
    agree(ask(prompt="About: "), model.encode(TEXTS, prompt="About: "))
    agree(ask(dimensions=16), model.encode(TEXTS, truncate_dim=16, normalize_embeddings=True))
    long = STORY * 60
    cut = post("/v1/embeddings", input=long, truncate_prompt_tokens=-1)
    agree(np.array([cut["data"][0]["embedding"]]), model.encode([long]))
    ranked = post("/v1/rerank", query="A fox?", documents=TEXTS)["results"]
    cosines = model.similarity(model.encode_query("A fox?"), model.encode_document(TEXTS))[0].numpy()
    agree(np.array([one["relevance_score"] for one in ranked]), np.sort(cosines)[::-1])


def scores() -> None:
    """Scores of pairs by a reranker."""
    model = sentence_transformers.CrossEncoder(MODEL, device="cpu")
    expected = model.predict([("Where did the fox wait?", text) for text in TEXTS])
    found = post("/v1/score", text_1="Where did the fox wait?", text_2=TEXTS)["data"]
    agree(np.array([one["score"] for one in found]), np.asarray(expected))


if __name__ == "__main__":
    {"embeddings": embeddings, "scores": scores}[sys.argv[1]]()
    print(f"sentence-transformers {sentence_transformers.__version__}: {sys.argv[1]}")
