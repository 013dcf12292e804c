//! Tracers in the arrays that a loss reads, while the loss is traced.
use std::{
    collections::{HashMap, HashSet},
    rc::Rc,
};

use faststep::engine::Left;
use mlx_rs::Array;
use pyo3::{intern, prelude::*, types::PyTuple};

use super::{
    looked::Spot,
    replaced::Placed,
    stop::{another, Stop},
    suspect::{self, Change},
    Looked,
};
use crate::{
    mlx::bridge,
    tree::renewed::Renewed,
    tree::{snapshot::Snapshot, text::text},
};

/// What a loss writes to what it reaches, in the numbers of arrays: nodes are others in another program.
#[derive(Default, PartialEq)]
pub struct Written {
    /// Arrays that it changes in place.
    in_place: Vec<usize>,
    /// Dicts, lists and tuples that it replaces by others of the same form, with their arrays: how far each is above the first one.
    replaced: Vec<(usize, Vec<usize>)>,
    /// Arrays whose objects it changes in place, wherever these are then: another array of the same object changes with it.
    touched: Vec<usize>,
    /// Arrays whose objects it changes in place and takes out of their places, each with the number of dicts, lists and tuples around
    /// it that it replaces: nobody else may hold these, who would see the change.
    dropped: Vec<(usize, usize)>,
    /// Arrays in whose places it puts the object that was in the place of another one.
    moved: Vec<(usize, usize)>,
    /// Arrays in whose places it puts the object that it puts in the place of another one too.
    doubled: Vec<(usize, usize)>,
    /// Arrays in whose places it puts others.
    pub stored: Vec<usize>,
    /// Dicts and lists of the model that it replaces.
    pub on_model: Vec<Renewed>,
}

impl Written {
    // which of the objects that the loss has placed, in the order of their numbers, are others' or placed twice
    fn note_objects(&mut self, placed: &Placed<'_>, spots: &[Spot<'_>]) {
        for (at, (number, object)) in placed.iter().enumerate() {
            let mut objects = spots.iter().map(|spot| &spot.object);
            if let Some(from) = objects.position(|it| it.is(object)) {
                self.moved.push((*number, from));
            } else if let Some((first, _)) = placed[..at].iter().find(|(_, it)| it.is(object)) {
                self.doubled.push((*number, *first));
            }
        }
    }

    /// Return whether it puts dicts, lists or tuples in the places of others.
    pub fn replaces(&self) -> bool {
        !(self.replaced.is_empty() && self.on_model.is_empty())
    }

    /// Return whether it puts one array object into several places, or into that of another one.
    pub fn exchanges(&self) -> bool {
        !(self.moved.is_empty() && self.doubled.is_empty())
    }

    /// Return whether nobody else holds the objects that the loss changes in place and takes out of their places.
    pub fn drops_its_own(&self, looked: &Looked, py: Python<'_>) -> PyResult<bool> {
        if self.dropped.is_empty() {
            return Ok(true);
        }
        let spots = looked.spots(py)?;
        let known = looked.known_references(&spots);
        let mut dropped = self.dropped.iter();
        Ok(dropped.all(|(number, around)| {
            let alone = spots
                .get(*number)
                .and_then(|spot| spot.alone(looked, &known));
            alone.is_some_and(|alone| alone >= *around)
        }))
    }

    /// Return whether the loss changes an array in place that has one value with another one, and the two are not among `shared`.
    pub fn touches_others(&self, ids: &[usize], shared: &[(usize, usize)]) -> bool {
        self.touched.iter().any(|&number| {
            let others = ids.iter().enumerate();
            let mut others = others.filter(|(at, id)| *at != number && ids.get(number) == Some(id));
            others.any(|(at, _)| !shared.contains(&(at.max(number), at.min(number))))
        })
    }
}

/// The objects of the arrays that a loss reaches hold tracers while this is in use.
///
/// The tracer is put into the array object itself, wherever that stands: in a tuple or a cell too.
pub struct Reached<'py> {
    looked: Rc<Looked>,
    traced: Option<Traced<'py>>, // none where the loss is called at every step
}

struct Traced<'py> {
    spots: Vec<Spot<'py>>,
    alone: Vec<Option<usize>>, // of each: how much of what is around it nobody else holds; none of an object that is held elsewhere
    tracers: Vec<Array>,
    first: usize,   // the number of the first among all other arrays
    reshapes: bool, // the trace repeats that the loss assigns arrays of another shape
    copies: Vec<(usize, Bound<'py, PyAny>)>, // of what is changed in place and is no container, by node
    snapshot: Snapshot<'py>,
}

impl<'py> Reached<'py> {
    /// Put in tracers; `others` are those of the model, then from `first` on those of the loss, then constants.
    pub fn new(
        py: Python<'py>,
        looked: Rc<Looked>,
        first: usize,
        (compiled, reshapes): (bool, bool),
        others: &[Array],
    ) -> PyResult<Self> {
        if !compiled {
            return Ok(Self {
                looked,
                traced: None,
            });
        }
        let spots = looked.spots(py)?;
        let known = looked.known_references(&spots);
        let alone = spots.iter().map(|spot| spot.alone(&looked, &known));
        let traced = Traced {
            alone: alone.collect(),
            spots,
            snapshot: looked.snapshot(&Snapshot::default(), py)?,
            copies: looked.copies(py)?,
            first,
            reshapes,
            tracers: others[first..][..looked.arrays.len()].to_vec(),
        };
        for (spot, tracer) in traced.spots.iter().zip(&traced.tracers).rev() {
            bridge::assign(&spot.object, tracer); // of an object at several places, the first one's
        }
        Ok(Self {
            looked,
            traced: Some(traced),
        })
    }

    /// The inputs among `others` that stand for constants.
    pub fn constants<'a>(&self, others: &'a [Array]) -> &'a [Array] {
        let traced = self.traced.as_ref();
        traced.map_or(&[], |traced| &others[traced.first + traced.tracers.len()..])
    }

    /// Read off what the loss has assigned: with it, the numbers and texts of each dict, list or tuple that it replaces.
    ///
    /// # Errors
    /// When a value is found that a trace cannot repeat.
    pub fn read(
        &self,
        py: Python<'py>,
        left: &mut Left,
    ) -> Result<(Written, Vec<Bound<'py, PyTuple>>), Stop> {
        let Some(traced) = &self.traced else {
            let spots = self.looked.spots(py)?;
            let arrays = spots
                .iter()
                .filter_map(|spot| bridge::get(&self.looked.now(spot)?));
            left.kept
                .extend(arrays.filter(faststep::engine::array::is_lazy));
            return Ok((Written::default(), Vec::new()));
        };
        let mut written = Written::default();
        let (mut placed, mut values) = (Placed::new(), Vec::new());
        for replaced in self.looked.replaced(py, traced.reshapes)? {
            let numbers: Vec<_> = replaced.arrays.iter().map(|(number, _)| *number).collect();
            let above = self.looked.program.above(replaced.node, numbers[0]);
            written.replaced.push((above, numbers));
            values.push(replaced.values);
            for (number, object) in replaced.arrays {
                let array = bridge::get(&object);
                left.others
                    .extend(array.map(|array| (traced.first + number, array)));
                placed.push((number, object));
            }
        }
        let mut firsts = HashMap::new();
        let mut met = HashSet::new();
        for (number, (spot, tracer)) in traced.spots.iter().zip(&traced.tracers).enumerate() {
            let name = || self.looked.name(py, number);
            let first = *firsts.entry(spot.object.as_ptr()).or_insert(tracer);
            let has_tracer = bridge::id(&spot.object) == Some(faststep::engine::array::id(first));
            if !has_tracer {
                written.touched.push(number);
            }
            if placed.iter().any(|(it, _)| *it == number) {
                continue; // its dict, list or tuple has been replaced
            }
            let object = self.looked.now(spot);
            let Some(array) = object.as_ref().and_then(bridge::get) else {
                return Err(Stop::Untraceable(format!("it removes {}", name())));
            };
            let same = object
                .as_ref()
                .is_some_and(|object| object.is(&spot.object));
            if same && !met.insert(spot.object.as_ptr()) {
                continue;
            }
            if faststep::engine::array::id(&array) == faststep::engine::array::id(tracer) {
                continue;
            }
            placed.extend(object.filter(|_| !same).map(|object| (number, object)));
            let fits = array.shape() == tracer.shape() && array.dtype() == tracer.dtype();
            if !fits && !traced.reshapes {
                return Err(Stop::Reshapes(another(&name(), tracer, &array)));
            }
            if same {
                written.in_place.push(number);
            } else {
                self.looked.put(spot, &spot.object)?;
            }
            left.others.push((traced.first + number, array));
        }
        self.check_stored(traced, py)?;
        written.dropped = self.dropped(py, traced, (&written, &placed))?;
        left.others.sort_by_key(|(number, _)| *number);
        placed.sort_by_key(|(number, _)| *number);
        written.note_objects(&placed, &traced.spots);
        Ok((written, values))
    }

    // the arrays whose objects the loss has changed in place and put nowhere that is reached
    fn dropped(
        &self,
        py: Python<'py>,
        traced: &Traced<'py>,
        (written, placed): (&Written, &Placed<'py>),
    ) -> Result<Vec<(usize, usize)>, Stop> {
        let mut dropped = Vec::new();
        for &number in &written.touched {
            let object = &traced.spots[number].object;
            let mut in_place = written.in_place.iter();
            if in_place.any(|other| traced.spots[*other].object.is(object))
                || placed.iter().any(|(_, it)| it.is(object))
            {
                continue; // the trace repeats it
            }
            let mut replaced = written.replaced.iter();
            let replaced = replaced.find(|(_, numbers)| numbers.contains(&number));
            let around = replaced.map_or(0, |(above, _)| above + 1);
            if traced.alone[number].is_none_or(|alone| alone < around) {
                let name = self.looked.name(py, number);
                return Err(Stop::Untraceable(format!(
                    "it changes {name} in place and puts another array there, while the first is held elsewhere too"
                )));
            }
            dropped.push((number, around));
        }
        Ok(dropped)
    }

    // nothing has come to be reached that the trace does not know, and no array has gone
    fn check_stored(&self, traced: &Traced<'py>, py: Python<'py>) -> Result<(), Stop> {
        let name = match self.looked.new_array(py) {
            Some(name) => Some(name),
            None => traced.snapshot.new_array(false)?,
        };
        if let Some(name) = name {
            return Err(Stop::Stores(format!("it stores a new array in {name}")));
        }
        let made = traced
            .snapshot
            .new_object(|object| self.looked.has(object))?;
        if let Some(name) = made {
            return Err(Stop::Stores(format!("it stores a new object: {name}")));
        }
        if let Some(name) = self.looked.gone(py) {
            return Err(Stop::Becomes(format!("it deletes {name}")));
        }
        if let Some((class, name)) = self.looked.program.classes.made(py)?.first() {
            let name = format!("{}.{}", text(class.name()?.as_any()), text(name));
            return Err(Stop::Becomes(format!("it makes {name} of a class")));
        }
        if let Some((cache, _)) = self.looked.made_states(py)?.first() {
            let name = cache.getattr_opt(intern!(py, "__qualname__"))?;
            let name = name.map_or_else(|| "a function".into(), |name| text(&name));
            return Err(Stop::Becomes(format!(
                "it makes what {name} keeps in its cache"
            )));
        }
        let lost = traced.snapshot.lost_array()?;
        if let Some(name) = lost {
            return Err(Stop::Untraceable(format!("it removes {name}")));
        }
        for (node, _) in &traced.copies {
            if self.looked.has_contents(py, *node)? {
                continue;
            }
            if let Some(name) = self.looked.contents_with_array(py, *node) {
                let what = format!("it stores a new array in {name}");
                return Err(Stop::Untraceable(what));
            }
        }
        Ok(())
    }

    /// Return whether what the loss has stored beside the arrays that it reaches holds none.
    pub fn holds_no_tracer(&self, py: Python<'py>) -> PyResult<bool> {
        let Some(traced) = &self.traced else {
            return Ok(true);
        };
        for (node, _) in &traced.copies {
            let changed = !self.looked.has_contents(py, *node)?;
            if changed && self.looked.contents_with_array(py, *node).is_some() {
                return Ok(false);
            }
        }
        let replaced = |spot: &Spot<'py>| {
            let now = self.looked.now(spot).filter(|_| spot.place.is_none());
            now.is_some_and(|now| !now.is(&spot.object) && bridge::is_array(&now))
        };
        Ok(!traced.spots.iter().any(replaced)
            && self.looked.new_array(py).is_none()
            && traced.snapshot.new_array(false)?.is_none())
    }

    /// What the loss has changed that is no array, with what was there before.
    pub fn changes(&self, py: Python<'py>) -> PyResult<Vec<Change>> {
        let Some(traced) = &self.traced else {
            return Ok(Vec::new());
        };
        let mut changes = suspect::changes(&traced.snapshot, true)?;
        for (node, before) in self.looked.changed(py) {
            let change = Change::Node(self.looked.clone(), node, before.unbind());
            if !self.is_stuck(py, node)? && !changes.iter().any(|other| change.is_of(other, py)) {
                changes.push(change);
            }
        }
        for (globals, key) in self.looked.made(py)? {
            let made = Change::Item(globals.unbind(), key.unbind(), None);
            if !changes.iter().any(|change| change.is_of(&made, py)) {
                changes.push(made);
            }
        }
        for (node, copy) in &traced.copies {
            if !self.looked.has_contents(py, *node)? {
                let copy = copy.clone().unbind();
                changes.push(Change::Contents(self.looked.clone(), *node, copy));
            }
        }
        // a deque of numbers is one of the contents above
        let (contents, mut others): (Vec<_>, Vec<_>) = changes
            .into_iter()
            .partition(|change| matches!(change, Change::Contents(..)));
        others.retain(|one| !contents.iter().any(|other| one.is_of(other, py)));
        others.extend(contents);
        Ok(others)
    }

    /// The names of numbers that the loss has changed and nobody can put back: attributes of classes in C that are read only.
    pub fn stuck(&self, py: Python<'py>) -> PyResult<Vec<String>> {
        let mut names = Vec::new();
        for (node, _) in self.traced.iter().flat_map(|_| self.looked.changed(py)) {
            if self.is_stuck(py, node)? {
                names.push(self.looked.program.name(py, node));
            }
        }
        Ok(names)
    }

    fn is_stuck(&self, py: Python<'py>, node: usize) -> PyResult<bool> {
        let now = self.looked.at(py, node);
        now.map_or(Ok(false), |now| {
            self.looked.put_at(node, &now).map(|put| !put)
        })
    }

    /// Put the arrays back, and after a loss that cannot be traced whatever else it has changed.
    pub fn restore(&self, py: Python<'py>, traced_well: bool) -> PyResult<()> {
        let Some(traced) = &self.traced else {
            return Ok(());
        };
        for (spot, array) in traced.spots.iter().zip(self.looked.arrays.iter()) {
            bridge::assign(&spot.object, array);
        }
        if traced_well {
            return Ok(());
        }
        self.looked.restore(py, &traced.snapshot, &traced.copies)
    }
}

impl Looked {
    /// Show what a step has made of the arrays that the loss reaches: `outputs` by number among all other arrays; `values`: of
    /// each dict, list or tuple that is replaced.
    pub fn show(
        &self,
        py: Python<'_>,
        outputs: &[(usize, Array)],
        first: usize,
        (written, values): (&Written, Option<&Bound<'_, PyTuple>>),
    ) -> PyResult<()> {
        let outputs = outputs.iter().filter(|(index, _)| *index >= first);
        let outputs = outputs.map(|(index, array)| (index - first, array.clone()));
        let outputs: Vec<_> = outputs.collect();
        if outputs.is_empty() {
            return Ok(());
        }
        let spots = self.spots(py)?;
        let replaced = written.replaced.iter().flat_map(|(_, numbers)| numbers);
        let replaced: HashSet<_> = replaced.collect();
        let other = |pairs: &[(usize, usize)], number: usize| {
            let pair = pairs.iter().find(|(one, _)| *one == number);
            pair.map(|(_, other)| *other)
        };
        let mut placed = Placed::new();
        for (number, array) in &outputs {
            if written.in_place.contains(number) {
                bridge::assign(&spots[*number].object, array);
                continue;
            }
            let first = other(&written.doubled, *number);
            let first = first.and_then(|first| placed.iter().find(|(it, _)| *it == first));
            let object = if let Some(from) = other(&written.moved, *number) {
                bridge::assign(&spots[from].object, array);
                spots[from].object.clone()
            } else if let Some((_, object)) = first {
                object.clone()
            } else {
                bridge::wrap(py, array)?
            };
            placed.push((*number, object));
        }
        for (number, object) in placed.iter().filter(|(it, _)| !replaced.contains(it)) {
            self.put(&spots[*number], object)?;
        }
        for (at, (above, numbers)) in written.replaced.iter().enumerate() {
            if let Some(node) = self.program.over(numbers[0], *above) {
                let values = values.and_then(|values| values.get_item(at).ok());
                let values = values.and_then(|values| values.cast_into().ok());
                self.replace(py, node, &placed, values.as_ref())?;
            }
        }
        Ok(())
    }
}
