from matplotlib.colors import to_rgb
from PIL import Image

from diffusionpipe.viz.pictures import new_figure, save_figure


def test_a_png_has_a_palette_and_keeps_flat_colours(tmp_path):
    figure = new_figure(1, 1)
    colors = ["#c6dbef", "#6baed6", "#08306b", "#bcbddc", "#6a51a3"]
    for place, color in enumerate(colors):
        figure.add_artist(figure.add_axes((place / 5, 0, 0.2, 1), facecolor=color, xticks=[], yticks=[]).patch)
    save_figure(figure, tmp_path / "bars.png")
    with Image.open(tmp_path / "bars.png") as picture:
        assert picture.mode == "P"
        found = picture.convert("RGB")
        middles = [found.getpixel((12 + 24 * place, 60)) for place in range(5)]
    wanted = [tuple(round(255 * part) for part in to_rgb(color)) for color in colors]
    assert middles == wanted
