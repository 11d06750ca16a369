"""The checks and reads of a run before anything is measured: its folder, its data, and whether all fits together."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path

from diffusionpipe.costs.graph import as_fraction
from diffusionpipe.errors import CheckpointError, ConfigError, DataError
from diffusionpipe.ir.data_survey import Survey
from diffusionpipe.models.base.family import MOST_CHUNKS
from diffusionpipe.models.opening.folder import family_of
from diffusionpipe.runtime.job.agreement import from_first, on_all
from diffusionpipe.runtime.job.process_group import Job, ending
from diffusionpipe.runtime.job.shared_file_system import check_shared_file_system
from diffusionpipe.trainer.checkpoints.checkpoint import clean, problem_of_folder
from diffusionpipe.trainer.data.batches.batch import Augmentation, BatchSource, kind_of
from diffusionpipe.trainer.data.batches.patch_order import PatchOrder
from diffusionpipe.trainer.data.batches.sized import HeldSizes, SizedSamples, agree_on_sizes, sized
from diffusionpipe.trainer.data.decoding.clips import selection_of
from diffusionpipe.trainer.data.masks.holes import MaskSource, problems_of_mask
from diffusionpipe.trainer.data.masks.kinds import MaskKind
from diffusionpipe.trainer.data.masks.loss import loss_mask_of, problem_of_loss_mask
from diffusionpipe.trainer.data.order import growth_of, num_epochs, num_positions
from diffusionpipe.trainer.data.scan.columns import Columns
from diffusionpipe.trainer.data.scan.data_files import FILE as LEDGER
from diffusionpipe.trainer.data.scan.data_files import Continuation, DataFiles, continued, first_ledger, read_ledger
from diffusionpipe.trainer.data.scan.dataset import NUM_EXAMPLES, Condition, Dataset, Findings, ScanRules
from diffusionpipe.trainer.data.scan.dataset_form import DATASETS
from diffusionpipe.trainer.data.scan.listing import is_around, is_same
from diffusionpipe.trainer.data.scan.same_files import agree_on_files
from diffusionpipe.trainer.data.scan.scanning import examine_place
from diffusionpipe.trainer.data.scan.skipped import FILE, Skipping
from diffusionpipe.trainer.data.scan.sources import joined_of
from diffusionpipe.trainer.data.sizes.order import SizeOrder
from diffusionpipe.trainer.data.sizes.patches import shares_of
from diffusionpipe.trainer.data.sizes.sizes import assign
from diffusionpipe.trainer.data.survey import Folder, SampleUse, kept_survey
from diffusionpipe.trainer.data.text.caption_lengths import readings_of
from diffusionpipe.trainer.data.text.tokens import Tokenizer
from diffusionpipe.trainer.data.text.treatment import Treatment
from diffusionpipe.trainer.inference import conditions
from diffusionpipe.trainer.inference.conditions import null_label
from diffusionpipe.trainer.launching.run_lock import acquire, join
from diffusionpipe.trainer.model.guidance import trained_guidance
from diffusionpipe.trainer.model.members import Member, RecipeModels
from diffusionpipe.trainer.model.optimizer_states import optimizer_states
from diffusionpipe.trainer.model.parameter_groups import parameter_groups
from diffusionpipe.trainer.optim.optimizer import problem_of_shapes, problem_of_step
from diffusionpipe.trainer.recipe import DataSection, OnError, Recipe, with_values
from diffusionpipe.trainer.recipe.schema import Measure
from diffusionpipe.trainer.recipe.size_rules import rules_of, run_of, sizes_of
from diffusionpipe.trainer.reporting.screen import Work

logger = logging.getLogger(__name__)

Check = Callable[[], None]
"""A check of a recipe, which raises a ConfigError if it fails."""


@contextmanager
def locked_folder(folder: Path, job: Job, *, take_over: bool = False) -> Iterator[None]:
    """A context in which no other job uses the folder: rank 0 holds its lock, or the lock of its launcher.

    Every rank calls it. `take_over`: take the lock from a job on another machine that gives no sign of life.

    A restart by torchrun takes over in this way, too.

    Raises:
        ConfigError: on all ranks; another job uses the folder, which is left as it is.
    """
    member, held = job.membership, ExitStack()

    def take() -> None:
        end = ending(member)
        lock = join(folder, member.launcher, on_loss=end) if member.launcher is not None else None
        # torchrun has restarted this attempt, maybe because the machine of the rank with the lock is gone.
        held.enter_context(lock or acquire(folder, take_over=take_over or member.attempt > 0, on_loss=end))

    with held:
        from_first(take)
        yield


def prepare_folder(folder: Path, resume: str | None) -> None:
    """Makes the run's folder, refuses a folder that the run cannot use, and removes files of an interrupted save.

    Every rank calls it. `resume`: the value of `--resume`, the same on all ranks; None without it.

    Raises:
        CheckpointError: with `resume`, there is nothing to resume or the folder cannot be made.
        ConfigError: without, the folder holds another run, cannot be made, or is not shared by all ranks.
    """

    def prepare() -> str | None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            clean(folder)
        except (CheckpointError, OSError) as error:
            return str(error)
        problem = problem_of_folder(folder, resume)
        if problem is None and resume is None:
            (folder / FILE).unlink(missing_ok=True)  # of an earlier run, which wrote no checkpoint
        return problem

    problem = from_first(prepare)
    if problem is not None:
        error = CheckpointError(problem) if resume is not None else ConfigError(problem)
        error.is_common = True
        raise error
    check_shared_file_system(folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The sources of a run's training and validation batches, sizes of their pictures, and facts about the files."""

    train: BatchSource
    """The training samples, from which batches are made."""
    validation: BatchSource | None
    """The held-out samples; None without validation data."""
    survey: Survey | None
    """The facts about the data; None on other ranks than rank 0."""
    ledger: DataFiles | None
    """The list of training files, each with the position in the data's order from which it counts; None on other ranks
    than rank 0."""
    sizes: SizedSamples | None
    """The order of the training samples by size; None where all have one size."""
    held: HeldSizes | None
    """The sizes of the held-out samples; None where all have one size, or there are none."""
    is_continued: bool
    """Whether the training data are known to be the same as the continued run's; on rank 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """The step of the checkpoint from which a run continues, and whether pictures were added to its data."""

    step: int
    """The number of steps that were done before the checkpoint."""
    has_grown: bool
    """Whether pictures have been added to its data."""


def read_data(
    opened: RecipeModels, work: Work, *others: Check, resumed: Resumed | None = None
) -> tuple[RecipeModels, Data]:
    """The model with its number of steps settled, and the training and validation data, which rank 0 scans for all.

    Every rank calls it. `work`: shows the progress. `others`: further checks, which rank 0 calls before the scan.
    `resumed`: the run that continues with these data, maybe with new files; None for a run that begins.

    Raises:
        ConfigError: data or checks fail; rank 0's scan and checks are refused on every rank, with all faults listed.
    """
    # Filled on rank 0 alone, where `from_first` runs the scan.
    scanned: list[Folder] = []
    ledgers: list[DataFiles] = []
    known: list[bool] = []

    def scan_and_join() -> tuple[Dataset, Dataset | None]:
        _, apart = _scan(opened, work, others, scanned)
        before = None if resumed is None else _ledger_before(opened.recipe, resumed)
        ledger = _ledger(opened.recipe, scanned[0].findings, scanned[0].dataset, before, resumed)
        scanned[0] = _in_order(scanned[0], ledger)
        ledgers.append(ledger)
        known.append(before is not None)
        return scanned[0].dataset, apart

    train, held_out = from_first(scan_and_join, DATASETS)
    for dataset in (train, held_out):
        if dataset is not None:
            agree_on_files(dataset)

    def sources() -> tuple[RecipeModels, Data]:
        order = _size_order(opened.recipe, train)
        placed = _patch_order(opened, train) or order
        # Epochs count the samples that are trained on.
        counted = with_steps(opened, train, len(order.assignment.left_out) if order is not None else 0)
        tokenizers = tokenizers_of(opened.members)
        data = opened.recipe.data
        source = _source(opened, train, _augmentation(opened.recipe), tokenizers, data.treatments)
        trained, plain = replace(source, skipping=_skipping(opened.recipe)), Treatment(captions=data.captions.rules)
        kept = _source(opened, held_out, Augmentation(), tokenizers, (plain,)) if held_out is not None else None
        return counted, Data(
            train=trained,
            sizes=_sized(opened, trained, placed),
            validation=kept,
            held=_held(opened, kept) if kept is not None else None,
            survey=_survey(counted, scanned, source, resumed, order) if scanned else None,
            ledger=ledgers[0] if ledgers else None,
            is_continued=any(known),
        )

    counted, data = on_all(sources)
    if data.sizes is not None:
        agree_on_sizes(data.sizes.order)
    return counted, data


def _size_order(recipe: Recipe, dataset: Dataset) -> SizeOrder | None:
    """The order of the samples where pictures have several sizes; None where all have one size.

    Raises:
        DataError: a size has too few pictures, or all are left out.
    """
    rules = rules_of(recipe.data)
    if rules is None:
        return None
    run = run_of(recipe)
    sources = [sample.source for sample in dataset.samples]
    assignment = assign(_sizes_of_pictures(dataset), rules, run, sources, _frames_of(dataset))
    return SizeOrder(assignment=assignment, seed=recipe.training.seed, run=run)


def _sizes_of_pictures(dataset: Dataset) -> list[tuple[int, int]]:
    """Width and height of each sample's picture, in pixels."""
    return [(sample.size[0], sample.size[1]) for sample in dataset.samples]


def _frames_of(dataset: Dataset) -> list[int]:
    """The largest number of frames that can be taken of each sample."""
    return [sample.frames for sample in dataset.samples]


def _patch_order(opened: RecipeModels, dataset: Dataset) -> PatchOrder | None:
    """The order of samples where each step has patches of one size; None for a recipe without patches."""
    patches, training = opened.recipe.data.patches, opened.recipe.training
    if patches is None:
        return None
    sizes = tuple(size for graph in opened.graph.of_sizes if (size := graph.size) is not None)
    return PatchOrder(
        sizes=sizes,
        shares=shares_of(patches.share_whole, len(sizes)),
        num_samples=len(dataset.samples),
        growth=dataset.growth,
        seed=training.seed,
        run=training.batch,
    )


def _sized(opened: RecipeModels, source: BatchSource, order: SizeOrder | PatchOrder | None) -> SizedSamples | None:
    """The order with a source of batches for each size that the model is built for; None without an order."""
    if order is None:
        return None
    graphs = opened.graph.of_sizes
    # One size has an order too, where some pictures are left out by theirs; only several have names in the graph.
    built = order.sizes if len(graphs) == 1 else [graph.size for graph in graphs if graph.size is not None]
    inputs = {size: graph.inputs for size, graph in zip(built, graphs, strict=True)}
    if opened.recipe.data.weigh is Measure.TOKENS and isinstance(order, SizeOrder):
        return sized(source, order, inputs, order.assignment.mean_pixels)
    return sized(source, order, inputs)


def _held(opened: RecipeModels, source: BatchSource) -> HeldSizes | None:
    """The sizes of held-out samples, with a source of batches for each size; None where all samples have one size.

    No held-out sample is left out for its size.
    """
    rules = rules_of(opened.recipe.data)
    if rules is None:
        return None
    pictures = _sizes_of_pictures(source.dataset)
    # Each held-out picture has a size, the nearest one, however small it is.
    rules = replace(rules, min_side=1, enlarge=True, of_sources=())
    found = assign(pictures, rules, 1, frames=_frames_of(source.dataset))
    built = sizes_of(opened.recipe.data)
    numbers = {picture: built.index(share.size) for share in found.shares for picture in share.members[0]}
    return HeldSizes(
        numbers=tuple(numbers[picture] for picture in range(len(pictures))),
        sources=tuple(replace(source, inputs=graph.inputs) for graph in opened.graph.of_sizes),
    )


def with_steps(opened: RecipeModels, dataset: Dataset, left_out: int = 0) -> RecipeModels:
    """The model with `training.steps` set to the steps of `training.epochs` with this data.

    It returns `opened` itself where no epochs are set. `left_out`: the number of samples that are not trained on.

    Raises:
        RecipeError: other keys do not fit to this number of steps.
    """
    training = opened.recipe.training
    if training.epochs is None:
        return opened
    steps = ceil(num_positions(training.epochs, len(dataset.samples) - left_out, dataset.growth) / training.batch)
    steps = min(steps, training.steps or steps)  # `training.steps` beside `epochs` is the most steps
    recipe = with_values(opened.recipe, {"training.steps": steps})
    members = tuple(replace(member, recipe=recipe.alone(member.name)) for member in opened.members)
    return replace(opened, recipe=recipe, members=members)


def _ledger_before(recipe: Recipe, resumed: Resumed) -> DataFiles | None:
    """The list of data files that the run wrote before it was resumed; None where an older version has written none.

    Raises:
        DataError: it cannot be read, or is missing though pictures have been added.
    """
    found = read_ledger(recipe.run.folder)
    if found is None and resumed.has_grown:
        raise DataError(
            f"{recipe.run.folder / LEDGER} is missing; without it the order of the data is not known, because pictures "
            "were added to them: restore it, or start a new run in another run.folder"
        )
    return found


def _ledger(
    recipe: Recipe, findings: Findings, dataset: Dataset, before: DataFiles | None, resumed: Resumed | None
) -> DataFiles:
    """The list of the scanned training files: a new one, or `before` with the files that were added since.

    `before`: the list that the run wrote before it was resumed; None without one.
    """
    if before is None or resumed is None:
        return first_ledger(findings.files)
    at = Continuation(
        position=resumed.step * recipe.training.batch, may_grow=recipe.data.allow_growth, noun=findings.noun
    )
    return continued(before, findings.files, [sample.name for sample in dataset.samples], at)


def _in_order(folder: Folder, ledger: DataFiles) -> Folder:
    """The folder's samples in the order in which their files entered the training data."""
    since, dataset, findings = ledger.since_of(), folder.dataset, folder.findings
    # Sorting is stable: files that entered together stay in the order of the scan.
    places = sorted(range(len(dataset.samples)), key=lambda place: since[dataset.samples[place].name])
    samples = tuple(dataset.samples[place] for place in places)
    growth = growth_of([(since[sample.name], 1) for sample in samples])
    return Folder(
        replace(dataset, samples=samples, growth=growth),
        replace(findings, sizes=tuple(findings.sizes[place] for place in places)),
    )


def _survey(
    opened: RecipeModels,
    scanned: Sequence[Folder],
    source: BatchSource,
    resumed: Resumed | None,
    order: SizeOrder | None,
) -> Survey:
    """The facts about the scanned folders for the user; the training data come first in `scanned`.

    `source`: the batches of the training data. `order`: the sizes of its pictures; None where all have one size.
    """
    recipe = opened.recipe
    drawn, training, data = recipe.sampling, recipe.training, recipe.data
    dataset = scanned[0].dataset
    use = SampleUse(
        steps=training.num_steps,
        batch=training.batch,
        epochs=num_epochs(training.num_steps * training.batch, len(dataset.samples), dataset.growth),
        from_step=0 if resumed is None else resumed.step,
        size=(data.resolution, data.height or data.resolution),
        treatments=data.treatments,
        sizes=None if order is None else order.assignment,
        same_size=1 if order is None else order.run,
        readings=readings_of(source.inputs, source.tokenizers),
        more_chunks=reads_more(recipe, opened.members),
        prompts=(*drawn.prompts, *drawn.negative_prompt) if drawn.every is not None else (),
    )
    return kept_survey(scanned[0], scanned[1] if len(scanned) > 1 else None, use)


def reads_more(recipe: Recipe, members: Sequence[Member]) -> bool:
    """Whether data.caption_chunks may be larger: it is below the limit, and all models can read further chunks."""
    return recipe.data.caption_chunks < MOST_CHUNKS and all(family_of(one.folder).has_chunks for one in members)


def _scan(
    opened: RecipeModels, work: Work, others: tuple[Check, ...], found: list[Folder]
) -> tuple[Dataset, Dataset | None]:
    """The training data and the validation data, None without any; it runs all checks first.

    `found` gets the scanned folders with their findings, the training data first.

    Raises:
        ConfigError: a check or a scan fails; it lists the faults of all.
    """
    data = opened.recipe.data
    need = Condition.LABEL if any(kind_of(name) == "labels" for name in opened.model.inputs) else Condition.TEXT
    taken = selection_of(data.frame_counts, data.frame_rate)

    def checked(done: int, total: int) -> None:
        work.show(done, total, {"pictures" if taken is None else "clips": f"{done}/{total}"})

    def scanned(folder: Path, other: Path | None, rules: ScanRules, columns: Columns) -> Folder:
        # A folder below this one is left out of its scan. If both are the same, nothing would be left.
        apart = None if other is None or is_same(folder, other) else other
        folder_rules = replace(rules, apart=apart)
        dataset, findings = examine_place(
            folder, need, columns=columns, taken=taken, progress=checked, rules=folder_rules
        )
        return Folder(_with_sizes(dataset, findings) if data.has_sizes else dataset, findings)

    def scan_train() -> None:
        rules = ScanRules(may_skip=True, skipping=_skipping(opened.recipe))
        own = {
            name: scanned(
                path, data.validation, replace(rules, prefix=f"{name}/" if name else ""), data.columns_of(name)
            )
            for name, path in data.folders.items()
        }
        found.append(Folder(*joined_of(own, data.sources)) if data.sources else own[""])
        _check_mask_files(opened.recipe, found[-1].dataset)
        _check_loss_masks(data, found[-1])

    def scan_held_out(folder: Path) -> None:
        around = next((path for path in data.folders.values() if is_around(folder, path)), None)
        found.append(scanned(folder, around, ScanRules(), data.columns_of("")))
        _check_mask_files(opened.recipe, found[-1].dataset)

    scans: list[Check] = [scan_train]
    if data.validation is not None:
        scans.append(partial(scan_held_out, data.validation))
        for path in data.folders.values():
            if is_same(path, data.validation):
                logger.warning(
                    'data=%s validation="data.validation is the folder of data.train: its pictures are trained on"',
                    path,
                )
    problems: list[ConfigError] = []
    # The cheap checks come first; all run, so that every problem is listed at once.
    checks: list[Check] = [partial(check_optimizer, opened), *others, *scans]
    for check in checks:
        try:
            check()
        except ConfigError as error:
            problems.append(error)
    if len(problems) == 1:  # keeps its class
        raise problems[0]
    if problems:
        raise ConfigError("\n".join(map(str, problems)))
    return found[0].dataset, found[1].dataset if len(found) > 1 else None


def _check_loss_masks(data: DataSection, found: Folder) -> None:
    """Refuses files that cannot be masks of the loss.

    Raises:
        DataError: names the first of them.
    """
    dataset, treatments = found.dataset, data.treatments
    files = {
        path: (dataset.path(place), found.findings.sizes[place])
        for place in range(len(dataset.samples))
        if (path := loss_mask_of(dataset, treatments, place)) is not None
    }
    _raise_faults(problem_of_loss_mask(path, *about) for path, about in files.items())


def _raise_faults(found: Iterable[str | None]) -> None:
    """Raises an error with the first faults of files and the number of the others, if there are any.

    Raises:
        DataError: a fault is not None.
    """
    if faults := [fault for fault in found if fault is not None]:
        more = f"\nand {len(faults) - NUM_EXAMPLES} more" if len(faults) > NUM_EXAMPLES else ""
        raise DataError("\n".join(faults[:NUM_EXAMPLES]) + more)


def _with_sizes(dataset: Dataset, findings: Findings) -> Dataset:
    """The samples with the sizes of their pictures, which only rank 0 has read from the files."""
    pairs = zip(dataset.samples, findings.sizes, strict=True)
    return replace(dataset, samples=tuple(replace(sample, size=size or ()) for sample, size in pairs))


def check_optimizer(opened: RecipeModels) -> None:
    """Refuses an optimizer that cannot train these parameters on this device, before anything is measured.

    Raises:
        ConfigError: names the parameters, or the arguments; RecipeError where its states cannot be counted.
    """
    groups = parameter_groups(opened.recipe, opened.model)
    optimizer_states(opened.recipe, opened.model)  # refuses those that cannot be counted
    for group, recipe in groups.recipes.items():
        settings, shapes = recipe.optimizer, groups.stepped_shapes(group, opened.model)
        problem = problem_of_shapes(settings.name, shapes, settings.learning_rate, settings.arguments)
        if problem is not None:
            raise ConfigError(f"optimizer.name: {problem}")
        dimensions = max(map(len, shapes.values()), default=2)
        problem = problem_of_step(settings.name, dimensions, settings.arguments, opened.device)
        if problem is not None:
            raise ConfigError(f"optimizer.arguments: {problem}")


def _augmentation(recipe: Recipe) -> Augmentation:
    return Augmentation(
        random_crop=recipe.data.random_crop,
        flip=recipe.data.flip,
        random_start=recipe.data.has_clips,
        condition_dropout=recipe.data.caption_dropout,
        self_conditioning=as_fraction(recipe.objective.self_conditioning),
        time_pairs=recipe.objective.speed_pairs,
        offset_noise=recipe.objective.offset_noise,
    )


def _skipping(recipe: Recipe) -> Skipping | None:
    if recipe.data.on_error is OnError.STOP:
        return None
    return Skipping(folder=recipe.run.folder, most=recipe.data.max_skipped)


def tokenizers_of(members: Sequence[Member]) -> dict[str, Tokenizer]:
    """The tokenizer of each raw input of tokens, keyed by the input's name in the graph of all models.

    Raises:
        ModelError: a tokenizer is missing, cannot be read, or makes tokens for which its text encoder has no embedding.
    """
    return {
        member.component(name): tokenizer
        for member in members
        for name, tokenizer in conditions.tokenizers_of(member.graph, member.folder).items()
    }


def _source(
    opened: RecipeModels,
    dataset: Dataset,
    augmentation: Augmentation,
    tokenizers: Mapping[str, Tokenizer],
    treatments: tuple[Treatment, ...],
) -> BatchSource:
    data = opened.recipe.data
    return BatchSource(
        dataset=dataset,
        inputs=opened.graph.inputs,
        seed=opened.recipe.training.seed,
        tokenizers=tokenizers,
        null_label=_null_label(opened),
        augmentation=augmentation,
        masks=mask_source(opened.recipe),
        whole=None if data.patches is None else (data.resolution, data.resolution),
        treatments=treatments,
        frame_rate=data.frame_rate,
        guidance=trained_guidance(opened.recipe),
    )


def mask_source(recipe: Recipe) -> MaskSource | None:
    """The kind of the recipe's masks and the pattern of their files; None for a recipe without masks."""
    data = recipe.data
    return None if data.masks is None else MaskSource(kind=data.masks, pattern=data.mask_file)


def _check_mask_files(recipe: Recipe, dataset: Dataset) -> None:
    """Refuses files that cannot be masks of their pictures.

    Raises:
        DataError: names the first of them.
    """
    source = mask_source(recipe)
    if source is None or source.kind is not MaskKind.FILE:
        return
    _raise_faults(problems_of_mask(source.path(one.name), dataset.path(i)) for i, one in enumerate(dataset.samples))


def _null_label(opened: RecipeModels) -> int | None:
    """The label of samples without a class, the same for all models that read labels; None if none reads labels.

    Raises:
        ConfigError: they have different numbers of classes.
    """
    labels = {
        member.name: null_label(member.graph)
        for member in opened.members
        if any(spec.name == "labels" for spec in member.graph.inputs)
    }
    if len(set(labels.values())) > 1:
        shown = ", ".join(f"{name} {count}" for name, count in labels.items())
        raise ConfigError(f"the models have different numbers of classes ({shown}); train models of the same classes")
    return next(iter(labels.values()), None)
