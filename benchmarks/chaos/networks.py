"""Source of the models and the data of random trainings."""

from __future__ import annotations

from typing import Final

from benchmarks.chaos.setting import Setting

_BRANCH_LAYER: Final = """
        self.branch = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))"""
_BODIES: Final = {
    "mlp": (
        """self.stem = nn.Linear(32, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.drop = nn.Dropout(0.1)""",
        """h = torch.relu(self.stem(x))
        for layer in self.layers:
            h = self.drop(torch.relu(layer(h)))""",
    ),
    "batchnorm": (
        """self.stem = nn.Sequential(nn.Linear(32, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())""",
        "h = self.body(self.stem(x))",
    ),
    "conv": (
        """self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
        )
        self.project = nn.Linear(128, WIDTH)""",
        "h = torch.relu(self.project(self.features(x).flatten(1)))",
    ),
    "embedding": (
        """self.embedding = nn.Embedding(500, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)""",
        "h = self.rnn(self.embedding(x))[0][:, -1]",
    ),
    "transformer": (
        """self.embedding = nn.Embedding(500, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True, dropout=0.1)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)""",
        "h = self.encoder(self.embedding(x)).mean(1)",
    ),
}
_GAN: Final = """class Generator(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 32))

    def forward(self, z):
        return self.layers(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, 1))

    def forward(self, x):
        return self.layers(x)"""
_SAMPLES: Final = {
    "mlp": "torch.randn(32, generator=g)",
    "batchnorm": "torch.randn(32, generator=g)",
    "gan": "torch.randn(32, generator=g)",
    "wgan": "torch.randn(32, generator=g)",
    "conv": "torch.randn(3, 16, 16, generator=g)",
    "embedding": "torch.randint(0, 500, (16,), generator=g)",
    "transformer": "torch.randint(0, 500, (16,), generator=g)",
}


def model_text(setting: Setting, in_forward: str) -> str:
    """Return the classes of the model.

    Args:
        in_forward: lines at the beginning of forward.
    """
    if setting.is_adversarial:
        return _GAN
    layers, forward = _BODIES[setting.model]
    argument = ", use_branch=True" if setting.has_branch else ""
    branch = "\n        if use_branch:\n            h = h + self.branch(h)" if setting.has_branch else ""
    begin = "".join(f"{line}\n        " for line in in_forward.splitlines())
    return f"""class Net(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        {layers.replace("WIDTH", "width")}{_BRANCH_LAYER.replace("WIDTH", "width") if setting.has_branch else ""}
        self.head = nn.Linear(width, 10)

    def forward(self, x{argument}):
        {begin}{forward}{branch}
        return self.head(h)"""


def data_text(setting: Setting, in_sample: str, in_batch: str) -> str:
    """Return the class or function that gives the data.

    Args:
        in_sample: lines that run for each sample, which know its ``index``.
        in_batch: lines that run for each batch, which know its number ``i`` and the ``rank``.
    """
    nap = f"time.sleep({setting.sleep_ms / 1000})"
    per_sample = f"        time.sleep({setting.sleep_ms / 1000 / setting.batch_size})\n" if setting.sleep_ms else ""
    sample = f"""def make_sample(index):
    g = torch.Generator().manual_seed(index)
    x = {_SAMPLES[setting.model]}
    return x, int(x.float().sum().abs()) % 10"""
    if setting.loader == "sampler":
        return f"""{sample}


class RandomData(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
{_indented(in_sample, 2)}{per_sample}        return make_sample(index)"""
    body = f"""{_indented(in_batch, 3)}            {nap}
            first = (i * world_size + rank) * {setting.batch_size}
            samples = [make_sample(index) for index in range(first, first + {setting.batch_size})]
            yield torch.stack([x for x, _ in samples]), torch.tensor([y for _, y in samples])"""
    if setting.loader == "iterable":
        return f"""{sample}


class Stream(IterableDataset):
    def __init__(self, rank, world_size, batches):
        self.rank, self.world_size, self.batches = rank, world_size, batches

    def __iter__(self):
        rank, world_size = self.rank, self.world_size
        for i in range(self.batches):
{body}"""
    lines = "\n".join(line[4:] for line in body.splitlines())
    return f"""{sample}


def batches_of(rank, world_size, batches):
    for i in range(batches):
{lines}"""


def loader_text(setting: Setting, batches: str) -> str:
    """Return the lines that make ``loader`` (and ``sampler``).

    Args:
        batches: how many there are, as source.
    """
    if setting.loader == "sampler":
        shuffle = "False" if "fixed order" in setting.habits else "True"
        return f"""dataset = RandomData({batches} * {setting.batch_size} * $world)
sampler = DistributedSampler(dataset, num_replicas=$world, rank=$rank, shuffle={shuffle})
loader = DataLoader(dataset, batch_size={setting.batch_size}, sampler=sampler, num_workers={setting.workers})"""
    if setting.loader == "iterable":
        return f"loader = DataLoader(Stream($rank, $world, {batches}), batch_size=None, num_workers={setting.workers})"
    if setting.loader == "list":
        return f"loader = list(batches_of($rank, $world, {batches}))"
    return f"loader = partial(batches_of, $rank, $world, {batches})"


def _indented(text: str, levels: int) -> str:
    return "".join(f"{'    ' * levels}{line}\n" for line in text.splitlines())
