"""EfficientNet-Lite0 in PyTorch's own layers, with the names that the trained weights have."""

import io

STAGES = [(1, 3, 1, 1, 16), (2, 3, 2, 6, 24), (2, 5, 2, 6, 40), (3, 3, 2, 6, 80), (3, 5, 1, 6, 112), (4, 5, 2, 6, 192)]
STAGES.append((1, 3, 1, 6, 320))


def reference_network(torch, content):
    """The network with the weights of a file, in evaluation mode; `features` turns images into features."""
    nn, functional = torch.nn, torch.nn.functional

    class Same(nn.Conv2d):
        def forward(self, x):
            sides = []
            for length in x.shape[:1:-1]:
                total = max((-(-length // self.stride[0]) - 1) * self.stride[0] + self.kernel_size[0] - length, 0)
                sides += [total // 2, total - total // 2]
            return super().forward(functional.pad(x, sides))

    def convolution(before, after, size=1, stride=1, groups=1):
        return Same(before, after, size, stride, groups=groups, bias=False)

    def norm(channels):
        return nn.BatchNorm2d(channels, eps=1e-3)

    class Block(nn.Module):
        def __init__(self, size, stride, expansion, before, after):
            super().__init__()
            within = before * expansion
            if expansion > 1:
                self._expand_conv, self._bn0 = convolution(before, within), norm(within)
            self._depthwise_conv, self._bn1 = convolution(within, within, size, stride, within), norm(within)
            self._project_conv, self._bn2 = convolution(within, after), norm(after)
            self.adds = stride == 1 and before == after

        def forward(self, x):
            y = functional.relu6(self._bn0(self._expand_conv(x))) if hasattr(self, "_expand_conv") else x
            y = functional.relu6(self._bn1(self._depthwise_conv(y)))
            y = self._bn2(self._project_conv(y))
            return x + y if self.adds else y

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self._conv_stem, self._bn0 = convolution(3, 32, 3, 2), norm(32)
            made, before = [], 32
            for count, size, stride, expansion, after in STAGES:
                for number in range(count):
                    made.append(Block(size, stride if number == 0 else 1, expansion, before, after))
                    before = after
            self._blocks = nn.ModuleList(made)
            self._conv_head, self._bn1, self._fc = convolution(320, 1280), norm(1280), nn.Linear(1280, 1000)

        def features(self, x):
            x = functional.relu6(self._bn0(self._conv_stem(x)))
            for block in self._blocks:
                x = block(x)
            return functional.relu6(self._bn1(self._conv_head(x))).mean((2, 3))

    network = Network().eval()
    network.load_state_dict(torch.load(io.BytesIO(content), weights_only=True))
    return network
